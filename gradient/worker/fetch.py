"""The source of a flake into the local store, as the store path `nix flake prefetch` gives. Layer: worker.

Repositories that git can clone are read from git's objects at the pinned commit, without a nix process;
anything else (archives, forges, submodules) is fetched by Nix itself in an evaluator child.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import attrs

from gradient.model import CachedSource, FailureKind, FlakeJob, Repository
from gradient.nar.bridge import in_thread
from gradient.nar.tree import Node
from gradient.nar.writer import dump_tree
from gradient.nix.daemon.operations import AddMethod
from gradient.nix.evaluator.errors import EvaluationFailed
from gradient.nix.evaluator.flake import fetch_tree
from gradient.nix.evaluator.messages import headline
from gradient.nix.evaluator.settings import Role
from gradient.nix.flake_ref import FORGE_HOSTS, FlakeKind, FlakeRef, git_source
from gradient.nix.flake_url import parse_flake_ref
from gradient.nix.hashes import Hash
from gradient.worker.downloads import Downloader
from gradient.worker.errors import JobFault
from gradient.worker.machine import Machine
from gradient.worker.source_tree import commit_source
from gradient.worker.store_info import path_infos

# The name of every fetched source in the store.
SOURCE: Final = "source"


async def fetch_source(spec: FlakeJob, machine: Machine, downloader: Downloader) -> CachedSource:
    """The flake's source, valid in the local store, with every attribute that evaluation sees.

    Raises JobFault, GitError, NixError and what the daemon raises; `errors.failure_of` knows them all.
    """
    if spec.cached is not None:
        await downloader.make_valid([spec.cached.store_path])
        return await _with_nar_hash(spec.cached, machine)
    if spec.repository is None:
        raise JobFault(FailureKind.PERMANENT, "the flake job names no source")
    return await _fetch_repository(spec.repository, machine)


async def _fetch_repository(repository: Repository, machine: Machine) -> CachedSource:
    reference = parse_flake_ref(repository.url)
    if repository.commit is not None:
        reference = attrs.evolve(reference, rev=repository.commit, ref=_ref_beside_rev(reference))
    if reference.kind is FlakeKind.GIT and not reference.submodules:
        return await _clone(reference, machine)
    if reference.kind is FlakeKind.FOLDER:
        raise JobFault(
            FailureKind.PERMANENT,
            f"{repository.url} is a folder, which a worker cannot see: upload it with `gradient build`",
        )
    return await _fetch_tree(reference, machine)


async def _clone(reference: FlakeRef, machine: Machine) -> CachedSource:
    git = git_source(reference)
    assert git is not None
    pinned = await machine.git.fetch(git.clone_url, ref=git.ref, rev=git.rev)
    source = await commit_source(machine.git.git, pinned.folder, pinned.commit, dir=git.dir)
    path, nar_hash = await add_source(source.tree, machine)
    return CachedSource(
        path,
        nar_hash=nar_hash,
        rev=source.rev,
        last_modified=source.last_modified,
        rev_count=source.rev_count,
        dir=git.dir,
    )


async def add_source(tree: Node, machine: Machine) -> tuple[str, str]:
    """Add a tree to the local store as a source; its path, and its NAR's hash as SRI."""
    async with machine.store.connection() as store, in_thread(_chunks(tree)) as nar:
        info = await store.add_to_store(SOURCE, AddMethod.RECURSIVE, nar)
    return info.path, Hash.parse(info.nar_hash, "sha256").sri()


async def _fetch_tree(reference: FlakeRef, machine: Machine) -> CachedSource:
    async with machine.evaluators.lend(None, Role.FETCH) as child:
        try:
            tree = await fetch_tree(child, tree_attributes(reference))
        except EvaluationFailed as error:
            raise JobFault(
                FailureKind.PERMANENT, f"{reference} cannot be fetched: {headline(str(error))}"
            ) from error
    return CachedSource(
        tree.path,
        nar_hash=tree.nar_hash,
        rev=tree.rev,
        last_modified=tree.last_modified,
        rev_count=tree.rev_count,
        dir=reference.dir,
    )


def tree_attributes(reference: FlakeRef) -> dict[str, str | int | bool]:
    """What `builtins.fetchTree` takes for a reference; `dir` is no part of the tree."""
    location: dict[str, str | int | bool]
    if reference.kind in FORGE_HOSTS:
        owner, _, repo = reference.location.rpartition("/")
        location = {"owner": owner, "repo": repo}
    elif reference.kind is FlakeKind.PATH:
        location = {"path": reference.location}
    else:
        query = "&".join(f"{name}={value}" for name, value in reference.extra)
        location = {"url": f"{reference.location}?{query}" if query else reference.location}
    optional: dict[str, str | int | bool | None] = {
        "ref": None if reference.rev and reference.kind in FORGE_HOSTS else reference.ref,
        "rev": reference.rev,
        "host": reference.host,
        "narHash": reference.nar_hash,
        "submodules": reference.submodules or None,
        "shallow": reference.shallow or None,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    return {"type": reference.kind.value, **location, **given}


def _ref_beside_rev(reference: FlakeRef) -> str | None:
    """A forge reference has a ref or a rev, not both."""
    return None if reference.kind in FORGE_HOSTS else reference.ref


async def _with_nar_hash(source: CachedSource, machine: Machine) -> CachedSource:
    """Nix evaluates a source in the store only together with its NAR's hash."""
    if source.nar_hash is not None:
        return source
    (info,) = await path_infos(machine, [source.store_path])
    return attrs.evolve(source, nar_hash=Hash.parse(info.nar_hash, "sha256").sri())


def _chunks(tree: Node) -> Generator[bytes, None, None]:
    yield from dump_tree(tree)
