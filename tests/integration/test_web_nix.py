"""A real `nix` substitutes from the cache."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio

from gradient.nar.bundle import BundleItem, EntryHeader
from gradient.nar.signing import SecretKey
from tests.integration.nix_support import Nix
from tests.integration.web_support import Web

pytestmark = pytest.mark.nix


@pytest.fixture(scope="module")
def closure(nix: str, tmp_path_factory: pytest.TempPathFactory) -> list[BundleItem]:
    """Two store paths, one with a reference to the other, to upload; the referrer comes last."""
    folder = tmp_path_factory.mktemp("nix")
    (folder / "leaf").mkdir()
    (folder / "leaf" / "data").write_bytes(b"leaf of " + folder.name.encode())
    store = Nix(Path(nix))
    leaf = store.out("nix-store", "--add", str(folder / "leaf"))
    expression = (
        f'derivation {{ name = "top"; system = builtins.currentSystem; builder = "/bin/sh";'
        f' args = [ "-c" "echo ${{builtins.storePath {leaf}}} > $out" ]; }}'
    )
    top = store.out("nix-build", "--no-out-link", "--option", "sandbox", "false", "-E", expression)
    return [_item(store, path) for path in (leaf, top)]


def _item(store: Nix, path: str) -> BundleItem:
    raw = json.loads(store.out("nix", "path-info", "--json", path))
    (info,) = raw if isinstance(raw, list) else raw.values()
    base_names = tuple(reference.rpartition("/")[2] for reference in info["references"])
    return BundleItem(EntryHeader(path, references=base_names), Path(path))


async def copy(web: Web, nix: str, to: Path, key: str, *paths: str) -> subprocess.CompletedProcess[str]:
    """`nix copy` from the cache into an empty store, trusting only `key`."""
    return await run(
        nix, "copy", "--from", f"{web.url}/cache/main", "--to", str(to), *paths, key=key, home=to.parent
    )


async def run(nix: str, *arguments: str, key: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [nix, "--extra-experimental-features", "nix-command", *arguments]
    options = {"require-sigs": "true", "trusted-public-keys": key, "substituters": ""}
    command += [part for name, value in options.items() for part in ("--option", name, value)]
    # A home of its own: `nix` remembers there what a cache of this address had.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    call = partial(subprocess.run, command, env=environment, capture_output=True, text=True, check=False)
    return await trio.to_thread.run_sync(call)


async def test_nix_copies_what_was_uploaded(
    web: Web, nix: str, closure: list[BundleItem], tmp_path: Path
) -> None:
    assert (await web.upload(*closure)).status == 200
    top, key = closure[-1].header.store_path, web.site.cache.public_key
    store = tmp_path / "fresh"
    done = await copy(web, nix, store, key, top)
    assert done.returncode == 0, done.stderr
    for item in closure:
        assert (store / item.header.store_path.lstrip("/")).exists()
    verified = await run(
        nix, "store", "verify", "--store", str(store), "--recursive", "--sigs-needed", "1", top,
        key=key, home=tmp_path,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stderr


async def test_nix_refuses_it_with_another_key(
    web: Web, nix: str, closure: list[BundleItem], tmp_path: Path
) -> None:
    assert (await web.upload(*closure)).status == 200
    other = str(SecretKey.generate("test-1").public_key())
    done = await copy(web, nix, tmp_path / "fresh", other, closure[-1].header.store_path)
    assert done.returncode != 0
    assert "signature" in done.stderr


async def test_nix_is_told_what_is_missing(
    web: Web, nix: str, closure: list[BundleItem], tmp_path: Path
) -> None:
    path = closure[0].header.store_path
    done = await copy(web, nix, tmp_path / "fresh", web.site.cache.public_key, path)
    assert done.returncode != 0
    assert path in done.stderr
    assert "unable to download" not in done.stderr


async def test_nix_reads_a_log(web: Web, nix: str, tmp_path: Path) -> None:
    expression = 'derivation { name = "logged"; system = "x86_64-linux"; builder = "/bin/sh"; }'
    drv = Path(Nix(Path(nix)).out("nix-instantiate", "-E", expression))
    await web.upload(BundleItem(EntryHeader(str(drv)), drv))
    world = web.world
    await world.record(await world.evaluation(), {"logged": []}, entries=["logged"])
    await world.start("logged")
    await world.log("logged", b"built with care\n")
    # `nix` reads the .drv file itself too, so it must be a real one.
    await world.connection.execute("UPDATE derivation SET hash = %s", (drv.name[:32],))
    done = await run(
        nix, "log", "--store", f"{web.url}/cache/main", str(drv), key=web.site.cache.public_key, home=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "built with care\n"), done.stderr
