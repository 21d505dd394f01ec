"""The Nix expressions that a child is sent. Layer: rank 1, pure.

A request is one line of printable ASCII: the child reads through a line editor, to which a tab or an
escape is a key. Anything else in an attribute name travels as JSON inside the expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from gradient.nix.evaluator.findings import AttrSet, Derivation, FlakeAddress, Plain, Question, Standing
from gradient.nix.store_path import InvalidStorePath, StorePath

_PRINTABLE: Final = frozenset(map(chr, range(0x20, 0x7F)))

# What a child of a flake defines next to it. `at` walks to an attribute and does not fail where there is
# none; `look` says what stands there and forces no more than that: of a set its names, never its values;
# of a derivation `drvPath`, which writes the `.drv` into the store, only when asked, and its names when
# asked. `each` looks at several names below `parent`, one after the other, and says each answer when it
# has it: an error ends it there. The names that requests use are short, for the line editor takes 2 µs
# for a character.
_DEFINITIONS: Final = (
    (
        "at = path: builtins.foldl'"
        " (at: name: let set = at.value; in if at.found && builtins.isAttrs set && set ? ${name}"
        " then { found = true; value = set.${name}; } else { found = false; value = null; })"
        " { found = true; value = flake.outputs; } path"
    ),
    (
        'derivationFacts = asked: v: { kind = "derivation"; }'
        " // (if asked.drvPath then { inherit (v) drvPath; } else { })"
        " // (if asked.names then { names = builtins.attrNames v; } else { })"
    ),
    (
        "look = asked: path: let v = (at path).value; in"
        ' if !builtins.isAttrs v then { kind = "plain"; type = builtins.typeOf v; }'
        ' else if (v.type or null) == "derivation" then derivationFacts asked v'
        ' else { kind = "set"; names = builtins.attrNames v; typed = v ? _type; }'
    ),
    "l = look { drvPath = false; names = true; }",
    "ld = look { drvPath = true; names = false; }",
    "ldn = look { drvPath = true; names = true; }",
    "each = l: parent: builtins.foldl' (_: name: s (l (parent ++ [ name ]))) null",
)


def protocol_definitions(token: str) -> str:
    """The lines that make a fresh child understand requests. `token` is what `Transcript` was given."""
    half = len(token) // 2
    lines = (
        f'token = "{token[:half]}" + "{token[half:]}"',
        's = value: builtins.trace (token + " val " + builtins.toJSON value) null',
        'e = number: token + " end " + builtins.toString number',
    )
    return "".join(f"{line}\n" for line in lines)


def flake_definitions(flake: FlakeAddress) -> str:
    """The lines that make `looks` understood, about this flake; nothing is fetched before it is used."""
    # Names are looked up where a line is read: the flake must be the first.
    expression = f"builtins.getFlake {quote(flake.url)}"
    if flake.input is not None:
        expression = f"({expression}).inputs.${{{quote(flake.input)}}}"
    lines = (f"flake = {expression}", *_DEFINITIONS)
    return "".join(f"{line}\n" for line in lines)


def request(number: int, statement: str) -> str:
    """The two lines of a request: one that says answers, and one that ends it in any case."""
    return f"{statement}\ne {number}\n"


def reset(number: int) -> str:
    """The lines that end a request which Nix waits for more of: what no expression can go on with, and its
    end once more."""
    return f")\ne {number}\n"


def alone(definitions: str, statement: str) -> str:
    """One expression that fails as `statement` fails in a child that was given `definitions`."""
    bindings = ["s = value: builtins.deepSeq value value", *definitions.splitlines()]
    return f"let {'; '.join(bindings)}; in {statement}"


def say(expression: str) -> str:
    """The statement that answers the value of one expression."""
    return f"s ({expression})"


def looks(questions: Sequence[Question]) -> str:
    """The statement that answers what stands at each of some sibling attributes, asked alike."""
    first = questions[0]
    verb = ("ldn" if first.inside else "ld") if first.instantiate else "l"
    if len(questions) == 1:
        return say(f"{verb} {quote_list(first.path)}")
    names = quote_list([question.path[-1] for question in questions])
    return f"each {verb} {quote_list(first.path[:-1])} {names}"


def read_look(value: object) -> Standing | str:
    """What one answer to `looks` says, or what is wrong with it: an attribute may only pretend to be a
    derivation."""
    match value:
        case {"kind": "plain", "type": str(kind)}:
            return Plain(kind)
        case {"kind": "set", "names": list(names), "typed": bool(typed)}:
            return AttrSet(tuple(names), typed)
        case {"kind": "derivation", **rest}:
            inside = rest.get("names")
            names = inside if isinstance(inside, list) else []
            return _read_derivation(rest, tuple(names))
    return "the evaluator gave an answer of no known form"


def exists(path: Sequence[str]) -> str:
    """Whether there is an attribute below the flake's outputs; forces what leads to it, not its value."""
    return f"(at {quote_list(path)}).found"


# Forces the flake file and its outputs function, no output.
FLAKE_INFO: Final = (
    "let i = flake.sourceInfo; in builtins.seq (builtins.attrNames flake.outputs)"
    " { path = i.outPath; narHash = i.narHash or null; rev = i.rev or null;"
    " lastModified = i.lastModified or null; revCount = i.revCount or null; }"
)


def fetch_tree(locked: object) -> str:
    """Fetch one locked input and describe what came."""
    return (
        f"let t = builtins.fetchTree (builtins.fromJSON {quote(json.dumps(locked))}); in"
        ' { path = "${t}"; narHash = t.narHash or null; rev = t.rev or null;'
        " lastModified = t.lastModified or null; revCount = t.revCount or null; }"
    )


def _read_derivation(fields: Mapping[object, object], names: tuple[str, ...]) -> Derivation | str:
    if "drvPath" not in fields:
        return Derivation(None, names)
    drv_path = fields["drvPath"]
    try:
        if isinstance(drv_path, str) and StorePath.parse(drv_path).name.endswith(".drv"):
            return Derivation(drv_path, names)
    except InvalidStorePath:
        pass
    return "it calls itself a derivation, but its drvPath is no store path of one"


def quote(text: str) -> str:
    """`text` as a Nix string in printable ASCII, whatever it holds."""
    if _PRINTABLE.issuperset(text):
        return f'"{_escape(text)}"'
    return f"(builtins.fromJSON {quote(json.dumps(text))})"


def quote_list(texts: Sequence[str]) -> str:
    """`texts` as a Nix list."""
    return f"[{' '.join(map(quote, texts))}]"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${")
