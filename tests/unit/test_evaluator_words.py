"""The expressions that are sent and the messages that come back."""

from __future__ import annotations

import pytest

from gradient.nix.evaluator.expressions import quote, read_look
from gradient.nix.evaluator.findings import AttrSet, Derivation, Plain
from gradient.nix.evaluator.messages import about_the_flake, headline, is_import_from_derivation, tidy

DRV = "/nix/store/00000000000000000000000000000000-hello.drv"

OLD_TRACE = """\
error: boo

       … while evaluating the attribute 'bad'

       at /nix/store/x-source/flake.nix:3:11:

            2|   a
            3|   bad = throw "boo";
             |   ^

       … while evaluating anonymous lambda

       at «string»:1:24:

            1| l = look
             |     ^

       … from call site

       at «string»:1:1:

            1| l [ "bad" ]
             | ^
"""
NEW_TRACE = """\
error:
       … from call site
         at «string»:1:1:
            1| l [ "bad" ]
             | ^

       … while calling the 'throw' builtin
         at «path:/nix/store/x-source»/flake.nix:3:11:
            3|   bad = throw "boo";
             |         ^

       error: boo
"""


def test_quoting_is_printable_ascii() -> None:
    assert quote('a"b\\c${d}$e') == '"a\\"b\\\\c\\${d}$e"'
    for text in ("tab\t", "é", "\x1b[A", "line\n", "\U0001f600"):
        assert all(" " <= character <= "~" for character in quote(text))


def test_answers() -> None:
    assert read_look({"kind": "plain", "type": "lambda"}) == Plain("lambda")
    assert read_look({"kind": "derivation"}) == Derivation()
    assert read_look({"kind": "derivation", "drvPath": DRV, "names": ["a"]}) == Derivation(DRV, ("a",))
    assert read_look({"kind": "set", "names": ["a"], "typed": True}) == AttrSet(("a",), typed=True)


@pytest.mark.parametrize("drv_path", [None, 5, "", "/etc/passwd", DRV.removesuffix(".drv"), f"{DRV}/x"])
def test_a_false_derivation(drv_path: object) -> None:
    answer = read_look({"kind": "derivation", "drvPath": drv_path})
    assert isinstance(answer, str)
    assert "drvPath" in answer


@pytest.mark.parametrize("answer", [None, [], {}, {"kind": "x"}])
def test_an_answer_of_no_known_form(answer: object) -> None:
    assert isinstance(read_look(answer), str)


@pytest.mark.parametrize("trace", [OLD_TRACE, NEW_TRACE])
def test_our_own_frames_are_taken_out(trace: str) -> None:
    message = tidy(trace)
    assert "l [" not in message
    assert "«string»" not in message
    assert "from call site" not in message
    assert "flake.nix:3:11" in message
    assert headline(message) == "error: boo"


def test_a_position_of_ours_below_the_error_itself() -> None:
    assert tidy("error: attribute 'x' missing\n\n       at «string»:1:1:\n\n     1| a.x\n      | ^\n") == (
        "error: attribute 'x' missing"
    )


def test_headline_without_an_error_line() -> None:
    assert headline("the evaluator was killed\n") == "the evaluator was killed"
    assert headline("") == "no reason given"


def test_import_from_derivation_is_recognised_wrapped_or_not() -> None:
    text = (
        f"error: cannot build '{DRV}^out' during evaluation"
        " because the option 'allow-import-from-derivation' is disabled"
    )
    assert is_import_from_derivation(text)
    assert is_import_from_derivation(text.replace(" during ", "\n       during "))
    assert not is_import_from_derivation("error: cannot build 'x' because of the weather")


@pytest.mark.parametrize(
    ("remarks", "expected"),
    [
        ("", ""),
        ("warning: `x` is deprecated", "`x` is deprecated"),
        ("trace: one\nwarning: two", "trace: one\nwarning: two"),
        ("warning: error: SQLite database '/nix/var/nix/db/db.sqlite' is busy\ntrace: one", "trace: one"),
        ("warning: SQLite database '/nix/var/nix/db/db.sqlite' is busy", ""),
    ],
)
def test_remarks_about_the_flake(remarks: str, expected: str) -> None:
    assert about_the_flake(remarks) == expected
