"""Flake sources against real git and real Nix: the same NAR hash as `nix flake prefetch`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio

from gradient.nar.errors import UnsupportedTree
from gradient.nar.tree import Directory, Node, Regular, Symlink
from gradient.nar.writer import dump_tree
from gradient.worker.git_process import Git, GitError
from gradient.worker.git_repo import GitCache, NoSuchCommit, check_rev, check_url, full_ref, shown
from gradient.worker.source_tree import NoFlake, commit_source, folder_source, local_source
from tests.patience import until

NIX = os.environ.get("GRADIENT_TEST_NIX", "nix")
HARDENED = Git.hardened(os.environ)
USERS = Git.of_the_user(os.environ)
AUTHOR = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
}


@attrs.frozen
class Repo:
    """A git repository to try things in."""

    path: Path

    def git(self, *arguments: str, **more: str) -> str:
        env = {**os.environ, **AUTHOR, "GIT_CONFIG_GLOBAL": "/dev/null", **more}
        done = subprocess.run(["git", *arguments], cwd=self.path, env=env, check=True, capture_output=True)
        return done.stdout.decode().strip()

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self, message: str, when: int = 1_700_000_000) -> str:
        self.git("add", "--all")
        date = f"{when} +0000"
        self.git("commit", "-q", "-m", message, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        return self.git("rev-parse", "HEAD")

    @property
    def url(self) -> str:
        return f"file://{self.path}"


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A flake with everything that a tree can hold; git sorts `a.b` before the folder `a`."""
    made = Repo(tmp_path / "repo")
    made.path.mkdir()
    made.git("init", "-q", "-b", "main")
    made.write("flake.nix", "{ outputs = _: { }; }")
    made.write("a/x", "1")
    made.write("a.b", "2")
    made.write("a-c", "3")
    made.write("deep/er/est/file", "deep")
    made.write("sub/flake.nix", "{ outputs = _: { }; }")
    made.write("empty", "")
    made.write("run", "#!/bin/sh\n")
    (made.path / "run").chmod(0o755)
    (made.path / "link").symlink_to("a/x")
    (made.path / "dangling").symlink_to("nowhere")
    (made.path / os.fsdecode(b"latin-\xe9")).write_bytes(b"\x00\xff" * 100_000)
    made.commit("one")
    return made


def nar_hash(tree: Node) -> str:
    digest = hashlib.sha256()
    for chunk in dump_tree(tree):
        digest.update(chunk)
    return "sha256-" + base64.b64encode(digest.digest()).decode()


def nix(*arguments: str, folder: Path, tmp: Path) -> dict[str, object]:
    registry = tmp / "registry.json"
    registry.write_text('{"flakes":[],"version":2}')
    options = ["--option", "substitute", "false", "--option", "flake-registry", str(registry)]
    features = ["--extra-experimental-features", "nix-command flakes"]
    command = [NIX, "flake", *arguments, "--json", *features, *options]  # options need their feature first
    env = {**os.environ, "HOME": str(tmp), "XDG_CACHE_HOME": str(tmp / "cache")}
    return json.loads(subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True).stdout)


def applies_gitattributes() -> bool:
    """Nix before 2.20 makes its trees with `git archive`."""
    printed = subprocess.run([NIX, "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(map(int, printed.split()[-1].split(".")[:2])) < (2, 20)


@pytest.fixture
def prefetched(tmp_path: Path) -> Callable[[str], object]:
    return lambda reference: nix("prefetch", reference, folder=tmp_path, tmp=tmp_path)["hash"]


@pytest.fixture
def cache(tmp_path: Path) -> GitCache:
    return GitCache(tmp_path / "git", HARDENED)


def listing(tree: Node, prefix: bytes = b"") -> dict[bytes, str]:
    """What a tree holds, read to its end: path to kind."""
    assert isinstance(tree, Directory)
    found: dict[bytes, str] = {}
    for name, node in tree.entries:
        if isinstance(node, Directory):
            found[prefix + name] = "folder"
            found |= listing(node, prefix + name + b"/")
        elif isinstance(node, Symlink):
            found[prefix + name] = f"-> {node.target.decode()}"
        else:
            assert isinstance(node, Regular)
            content = b"".join(node.chunks)
            assert len(content) == node.size
            found[prefix + name] = "program" if node.executable else "file"
    return found


# --- a commit -------------------------------------------------------------------------------------


@pytest.mark.nix
async def test_a_commit_has_the_hash_that_nix_gives_it(
    repo: Repo, cache: GitCache, prefetched: Callable[[str], object]
) -> None:
    rev = repo.git("rev-parse", "HEAD")
    pinned = await cache.fetch(repo.url, rev=rev)
    source = await commit_source(HARDENED, pinned.folder, pinned.commit)
    assert nar_hash(source.tree) == prefetched(f"git+{repo.url}?rev={rev}")


@pytest.mark.nix
async def test_a_submodule_is_an_empty_folder(
    repo: Repo, cache: GitCache, prefetched: Callable[[str], object]
) -> None:
    other = repo.git("rev-parse", "HEAD")
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{other},lib/submodule")
    repo.git("commit", "-q", "-m", "two")
    rev = repo.git("rev-parse", "HEAD")
    pinned = await cache.fetch(repo.url, rev=rev)
    source = await commit_source(HARDENED, pinned.folder, pinned.commit)
    assert nar_hash(source.tree) == prefetched(f"git+{repo.url}?rev={rev}")
    again = await commit_source(HARDENED, pinned.folder, pinned.commit)
    assert listing(again.tree)[b"lib/submodule"] == "folder"


@pytest.mark.nix
async def test_gitattributes_leave_the_blobs_as_they_are(
    repo: Repo, cache: GitCache, prefetched: Callable[[str], object]
) -> None:
    """Nix 2.8 runs `git archive`, which applies them; current Nix does not, and neither do we."""
    repo.write(".gitattributes", "a.b export-ignore\nsubst export-subst\ncrlf text eol=crlf\n")
    repo.write("subst", "$Format:%H$\n")
    repo.write("crlf", "1\n2\n")
    rev = repo.commit("attributes")
    pinned = await cache.fetch(repo.url, rev=rev)
    source = await commit_source(HARDENED, pinned.folder, pinned.commit)
    found = nar_hash(source.tree)
    assert (found == prefetched(f"git+{repo.url}?rev={rev}")) is not applies_gitattributes()
    again = await commit_source(HARDENED, pinned.folder, pinned.commit)
    assert listing(again.tree)[b"a.b"] == "file"


async def test_the_tree_of_a_commit(repo: Repo, cache: GitCache) -> None:
    pinned = await cache.fetch(repo.url)
    source = await commit_source(HARDENED, pinned.folder, pinned.commit)
    assert listing(source.tree) == {
        b"a": "folder",
        b"a-c": "file",
        b"a.b": "file",
        b"a/x": "file",
        b"dangling": "-> nowhere",
        b"deep": "folder",
        b"deep/er": "folder",
        b"deep/er/est": "folder",
        b"deep/er/est/file": "file",
        b"empty": "file",
        b"flake.nix": "file",
        b"latin-\xe9": "file",
        b"link": "-> a/x",
        b"run": "program",
        b"sub": "folder",
        b"sub/flake.nix": "file",
    }


async def test_giving_up_a_tree_ends_its_git(repo: Repo, cache: GitCache) -> None:
    pinned = await cache.fetch(repo.url)
    source = await commit_source(HARDENED, pinned.folder, pinned.commit)
    before = children()
    chunks = dump_tree(source.tree)
    next(chunks)
    assert children() - before
    chunks.close()
    del chunks, source
    assert not children() - before


def children() -> set[str]:
    """The processes that this one has started; tests before may have left some that still end."""
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


# --- fetching -------------------------------------------------------------------------------------


async def test_head_and_refs_move_and_a_rev_stays(repo: Repo, cache: GitCache) -> None:
    first = (await cache.fetch(repo.url)).commit
    assert (first.last_modified, first.rev_count) == (1_700_000_000, 1)
    repo.write("more", "x")
    second = repo.commit("two", when=1_700_000_100)
    repo.git("tag", "-a", "v1", "-m", "an annotated tag")
    repo.git("switch", "-q", "-c", "feature/x")
    repo.write("more", "y")
    third = repo.commit("three")
    repo.git("switch", "-q", "main")
    for ref, expected in (
        (None, second),
        ("HEAD", second),
        ("main", second),
        ("feature/x", third),
        ("refs/heads/feature/x", third),
        ("refs/tags/v1", second),
    ):
        assert (await cache.fetch(repo.url, ref=ref)).commit.rev == expected
    old = (await cache.fetch(repo.url, rev=first.rev)).commit
    assert old == first
    assert (await cache.fetch(repo.url)).commit.rev_count == 2


async def test_a_commit_that_no_branch_names_is_fetched_by_its_sha(repo: Repo, cache: GitCache) -> None:
    await cache.fetch(repo.url)
    repo.write("more", "x")
    rev = repo.commit("of a fork")
    repo.git("reset", "-q", "--hard", "HEAD~1")
    assert (await cache.fetch(repo.url, rev=rev)).commit.rev == rev


async def test_a_rev_that_is_held_needs_no_remote(repo: Repo, cache: GitCache) -> None:
    rev = (await cache.fetch(repo.url)).commit.rev
    shutil.rmtree(repo.path)
    assert (await cache.fetch(repo.url, rev=rev)).commit.rev == rev
    with pytest.raises(GitError, match=r"repo"):
        await cache.fetch(repo.url)


async def test_what_is_not_there_is_named(repo: Repo, cache: GitCache) -> None:
    with pytest.raises(NoSuchCommit, match=r"has no absent$"):
        await cache.fetch(repo.url, ref="absent")
    with pytest.raises(NoSuchCommit, match=f"has no commit {'0' * 39}1$"):
        await cache.fetch(repo.url, rev="0" * 39 + "1")
    tree = repo.git("rev-parse", "HEAD:deep")
    with pytest.raises(NoSuchCommit, match=f"has no commit {tree}$"):
        await cache.fetch(repo.url, rev=tree)
    repo.git("update-ref", "refs/tags/no-commit", tree)
    with pytest.raises(NoSuchCommit, match="is no commit"):
        await cache.fetch(repo.url, ref="refs/tags/no-commit")


async def test_a_shallow_repository_has_no_count(repo: Repo, cache: GitCache, tmp_path: Path) -> None:
    repo.write("more", "x")
    rev = repo.commit("two")
    shallow = Repo(tmp_path / "shallow")
    repo.git("clone", "-q", "--depth=1", repo.url, str(shallow.path))
    assert (await cache.fetch(shallow.url)).commit == attrs.evolve(
        (await cache.fetch(repo.url)).commit, rev=rev, rev_count=None
    )


async def test_locks_of_a_killed_git_are_no_obstacle(repo: Repo, cache: GitCache) -> None:
    folder = (await cache.fetch(repo.url)).folder
    repo.write("more", "x")
    rev = repo.commit("two")
    for name in ("packed-refs.lock", "config.lock", "HEAD.lock", "shallow.lock"):
        (folder / name).touch()
    (held,) = (folder / "refs/gradient/ref").iterdir()
    held.with_name(f"{held.name}.lock").touch()
    assert (await cache.fetch(repo.url)).commit.rev == rev


async def test_two_fetches_of_one_url_take_turns(repo: Repo, cache: GitCache) -> None:
    revs = []

    async def fetch() -> None:
        revs.append((await cache.fetch(repo.url)).commit.rev)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        nursery.start_soon(fetch)
    assert revs == [repo.git("rev-parse", "HEAD")] * 2


async def test_hooks_and_configuration_of_others_are_not_used(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\ntouch {trap}\n")
    (hooks / "reference-transaction").chmod(0o755)
    config = tmp_path / ".gitconfig"
    config.write_text(f'[core]\n\thooksPath = {hooks}\n[url "file:///nowhere"]\n\tinsteadOf = {repo.url}\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    await GitCache(tmp_path / "git", Git.hardened(os.environ)).fetch(repo.url)
    assert not trap.exists()


def is_running(pid: int) -> bool:
    """Whether the process still executes; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_cancelled_git_ends_with_its_helpers(tmp_path: Path) -> None:
    """The child hangs in a helper that ignores SIGTERM; both are killed when the cancelled call returns."""
    helper = tmp_path / "git-hang"
    helper.write_text(
        "#!/bin/sh\ntrap '' TERM\necho $$ > pid.new && mv pid.new pid\nwhile :; do sleep 1; done\n"
    )
    helper.chmod(0o755)
    git = Git({**HARDENED.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(git.run, tmp_path, "hang")
        await until((tmp_path / "pid").exists)
        nursery.cancel_scope.cancel()
    # Killed when the call returned; a busy machine takes a moment to let go of a process.
    helper_pid = int((tmp_path / "pid").read_text())
    await until(lambda: not is_running(helper_pid))


async def test_too_much_output_is_refused(
    repo: Repo, cache: GitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient.worker.git_process.MAX_OUTPUT", 100)
    pinned = await cache.fetch(repo.url)
    with pytest.raises(GitError, match="more than 100 bytes"):
        await commit_source(HARDENED, pinned.folder, pinned.commit)


async def test_without_git_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(GitError, match="git is not installed"):
        await Git({"PATH": str(tmp_path)}).run(tmp_path, "status")


@pytest.mark.parametrize(
    "url",
    ["ext::sh -c id", "--upload-pack=id", "/etc", "host:path", "https:/x", "ftp://x/y", "file://a\nb", ""],
)
def test_urls_that_git_must_not_see(url: str) -> None:
    with pytest.raises(GitError, match="cannot fetch"):
        check_url(url)


@pytest.mark.parametrize(
    "ref", ["", "a b", "a:b", "+a:b", "-x", "a..b", "a~1", "a^", "*", "a\n", ".a", "a/", "a.lock"]
)
def test_refs_that_git_must_not_see(ref: str) -> None:
    with pytest.raises(GitError, match="not a branch"):
        full_ref(ref)


def test_revs_urls_and_refs_that_are_fine() -> None:
    assert check_rev("a" * 40) == "a" * 40
    for rev in ("HEAD", "a" * 39, "A" * 40, "-" * 40, "a" * 40 + "\n"):
        with pytest.raises(GitError, match="not a commit"):
            check_rev(rev)
    assert full_ref("feature/+x") == "refs/heads/feature/+x"
    assert full_ref("refs/pull/1/head") == "refs/pull/1/head"
    assert shown("https://user:secret@host/a@b") == "https://host/a@b"


# --- a local flake --------------------------------------------------------------------------------


@pytest.mark.nix
async def test_a_clean_working_tree_is_its_commit(repo: Repo, tmp_path: Path) -> None:
    repo.write("untracked", "x")
    source = await local_source(USERS, repo.path)
    told = nix("metadata", str(repo.path), folder=tmp_path, tmp=tmp_path)["locked"]
    assert isinstance(told, dict)
    assert (source.rev, source.last_modified, source.rev_count) == (
        told["rev"],
        told["lastModified"],
        told["revCount"],
    )
    assert nar_hash(source.tree) == told["narHash"]


@pytest.mark.nix
async def test_a_changed_working_tree_is_its_tracked_files(repo: Repo, tmp_path: Path) -> None:
    repo.write("a.b", "changed")
    repo.write("staged", "new")
    repo.git("add", "staged")
    repo.write("intended", "new")
    repo.git("add", "--intent-to-add", "intended")
    repo.write("untracked", "x")
    shutil.rmtree(repo.path / "deep")
    (repo.path / "run").chmod(0o644)
    (repo.path / "link").unlink()
    (repo.path / "link").symlink_to("a.b")
    source = await local_source(USERS, repo.path)
    told = nix("metadata", str(repo.path), folder=tmp_path, tmp=tmp_path)["locked"]
    assert isinstance(told, dict)
    assert (source.rev, source.rev_count, source.last_modified) == (None, None, told["lastModified"])
    assert nar_hash(source.tree) == told["narHash"]
    found = listing((await local_source(USERS, repo.path)).tree)
    assert (found[b"run"], found[b"link"], found[b"staged"]) == ("file", "-> a.b", "file")
    assert not found.keys() & {b"untracked", b"deep", b"deep/er"}


@pytest.mark.nix
async def test_a_flake_below_the_top_names_its_folder(repo: Repo, tmp_path: Path) -> None:
    repo.write("a.b", "changed")
    (repo.path / "sub" / "inner").mkdir()
    source = await local_source(USERS, repo.path / "sub" / "inner")
    told = nix("metadata", str(repo.path / "sub"), folder=tmp_path, tmp=tmp_path)["locked"]
    assert isinstance(told, dict)
    assert source.dir == told["dir"] == "sub"
    assert nar_hash(source.tree) == told["narHash"]


@pytest.mark.nix
async def test_outside_git_it_is_the_whole_folder(repo: Repo, tmp_path: Path) -> None:
    shutil.rmtree(repo.path / ".git")
    os.utime(repo.path / "a.b", (1_900_000_000, 1_900_000_000))
    source = await local_source(USERS, repo.path)
    told = nix("metadata", str(repo.path), folder=tmp_path, tmp=tmp_path)["locked"]
    assert isinstance(told, dict)
    assert (source.last_modified, source.rev, source.dir) == (told["lastModified"], None, "")
    assert source.last_modified == 1_900_000_000
    assert nar_hash(source.tree) == told["narHash"]


async def test_a_repository_before_its_first_commit(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.git("init", "-q")
    repo.write("flake.nix", "{ }")
    with pytest.raises(NoFlake, match=r"git -C .* add flake\.nix"):
        await local_source(USERS, repo.path)
    repo.git("add", "flake.nix")
    source = await local_source(USERS, repo.path)
    assert (source.rev, source.last_modified) == (None, 0)
    assert listing(source.tree) == {b"flake.nix": "file"}


async def test_tracked_files_behind_a_swapped_folder_are_gone(repo: Repo, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "er" / "est").mkdir(parents=True)
    (outside / "er" / "est" / "file").write_text("not ours")
    shutil.rmtree(repo.path / "deep")
    (repo.path / "deep").symlink_to(outside)
    (repo.path / "a.b").unlink()
    (repo.path / "a.b").mkdir()
    found = listing((await local_source(USERS, repo.path)).tree)
    assert not found.keys() & {b"deep", b"deep/er/est/file", b"a.b"}


async def test_a_tracked_socket_is_refused_in_words(repo: Repo) -> None:
    (repo.path / "a.b").unlink()
    os.mkfifo(repo.path / "a.b")
    source = await local_source(USERS, repo.path)
    with pytest.raises(UnsupportedTree, match=r"a\.b"):
        listing(source.tree)


async def test_no_flake_is_one_clear_line(tmp_path: Path, repo: Repo) -> None:
    with pytest.raises(NoFlake, match="there is no "):
        await local_source(USERS, tmp_path / "absent")
    (repo.path / "flake.nix").unlink()
    (tmp_path / "flake.nix").touch()
    with pytest.raises(NoFlake, match=r"no flake\.nix in .*within its repository"):
        await local_source(USERS, repo.path)


async def test_the_folder_decides_whatever_the_environment_says(
    repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_WORK_TREE", "/")
    source = await local_source(Git.of_the_user(os.environ), repo.path)
    assert source.rev == repo.git(
        "rev-parse", "HEAD", GIT_DIR=str(repo.path / ".git"), GIT_WORK_TREE=str(repo.path)
    )


async def test_a_folder_as_it_is(repo: Repo) -> None:
    repo.write("untracked", "x")
    found = listing((await folder_source(repo.path)).tree)
    assert b"untracked" in found
    assert b".git" in found
