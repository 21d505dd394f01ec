"""Which file lies where in a data directory. Paths only; nothing here is read or made.

| path           | mode | what it is                                                                  |
|----------------|------|-----------------------------------------------------------------------------|
| `admin-token`  | 0600 | what the CLI shows to write through the API                                 |
| `worker-token` | 0600 | what a worker on this host shows to connect                                 |
| `signing-key`  | 0600 | the cache's Ed25519 key, in the format of `nix-store --generate-binary-cache-key` |
| `grant-secret` | 0600 | signs the tokens of uploads and downloads                                   |
| `worker-id`    | 0644 | the id under which this host's worker is known                              |
| `http-url`     | 0644 | where the running server is; CLI and worker on this host read it            |
| `version`      | 0644 | the data version; newer than the program knows is refused                   |
| `postgres/`    | 0700 | the embedded database                                                       |
| `store/`       | 0755 | the cache's objects, when they are local files                              |
| `git/`         | 0700 | bare clones of the sources that a worker fetched                            |
| `build-hook`   | 0755 | what a worker has its Nix daemon ask instead of other machines              |

The directory itself may be 0755: an embedded database that starts as root opens its parents. So
secrets rely on the modes of their own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/gradient`. A relative XDG_STATE_HOME is ignored, as XDG says."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(environ.get("HOME", "~")).expanduser() / ".local" / "state"
    return state / "gradient"


@attrs.frozen
class DataDir:
    """The layout below `root`."""

    root: Path

    @property
    def admin_token(self) -> Path:
        """Secret."""
        return self.root / "admin-token"

    @property
    def worker_token(self) -> Path:
        """Secret."""
        return self.root / "worker-token"

    @property
    def signing_key(self) -> Path:
        """Secret."""
        return self.root / "signing-key"

    @property
    def grant_secret(self) -> Path:
        """Secret."""
        return self.root / "grant-secret"

    @property
    def worker_id(self) -> Path:
        """Public."""
        return self.root / "worker-id"

    @property
    def http_url(self) -> Path:
        """Public; written once the server listens, removed when it stops."""
        return self.root / "http-url"

    @property
    def version(self) -> Path:
        """Public."""
        return self.root / "version"

    @property
    def postgres(self) -> Path:
        """A folder that belongs to the embedded database alone."""
        return self.root / "postgres"

    @property
    def store(self) -> Path:
        """The folder of the cache's objects."""
        return self.root / "store"

    @property
    def git(self) -> Path:
        """The folder of the bare clones."""
        return self.root / "git"

    @property
    def build_hook(self) -> Path:
        """A program that the Nix daemon runs."""
        return self.root / "build-hook"
