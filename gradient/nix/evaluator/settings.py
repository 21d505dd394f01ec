"""How evaluator children are started. Layer: rank 1, pure but for the two files it writes.

A child sees none of the worker's environment and none of its user's Nix configuration. The system's own
`nix.conf` still counts (substituters and access tokens are set there), below the options given here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

import attrs

from gradient.nix.evaluator.child import Invocation

# Where the store is and how the network is reached; nothing that a flake could use to tell hosts apart.
_PASSED_ON: Final = (
    "PATH", "TMPDIR",
    "NIX_REMOTE", "NIX_DAEMON_SOCKET_PATH",
    "NIX_STORE_DIR", "NIX_STATE_DIR", "NIX_LOG_DIR", "NIX_CONF_DIR", "NIX_DATA_DIR",
    "NIX_SSL_CERT_FILE", "SSL_CERT_FILE", "SSH_AUTH_SOCK",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip

# An empty registry: with the global one, a child without a network fails where it need not ask at all.
_EMPTY_REGISTRY: Final = '{"flakes":[],"version":2}\n'


class Role(Enum):
    """What a child is for, and so what it may do."""

    # Evaluates a flake. May read the store and the flake's inputs; builds nothing.
    EVALUATE = "evaluate"
    # Evaluates attributes that import from derivations: its store is a proxy that has builds made.
    IMPORT = "import"
    # Fetches flakes and locked inputs. Runs our expressions only, so it may read what these name.
    FETCH = "fetch"


@attrs.frozen
class EvaluatorSettings:
    """`nix` is the binary; `home` a private folder for its caches, kept between runs so that fetched inputs
    are found again. `store` is a store URI for `--store`, None for the system's. `environment` is what is
    passed on to children, by name, and `extra_options` come last and win."""

    nix: Path
    home: Path
    store: str | None = None
    show_trace: bool = True
    extra_options: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ), repr=False)

    def prepare(self) -> None:
        """Make the home folder and the files children are pointed to. Raises OSError. Blocking, short."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._registry.write_text(_EMPTY_REGISTRY)

    def invocation(
        self, role: Role, *, store: str | None = None, allowed_uris: Sequence[str] | None = None
    ) -> Invocation:
        """The command of a child. `store` overrides the store of these settings; with `allowed_uris`
        evaluation is restricted to the store and to these."""
        options = self._options(role)
        if allowed_uris is not None:
            options["restrict-eval"] = "true"
            # The option is a list with blanks between; a URL with one in it stays forbidden.
            options["allowed-uris"] = " ".join(uri for uri in allowed_uris if not re.search(r"\s", uri))
        argv = self._argv(store or self.store, options | dict(self.extra_options))
        return Invocation(argv, self._child_environment(), self.home)

    @property
    def _registry(self) -> Path:
        return self.home / "flake-registry.json"

    def _options(self, role: Role) -> dict[str, str]:
        return {
            "substitute": "false",
            "flake-registry": str(self._registry),
            # A source that is not locked yet, such as the newest commit of a branch, is no pure one.
            "pure-eval": "false" if role is Role.FETCH else "true",
            "allow-import-from-derivation": "true" if role is Role.IMPORT else "false",
            "max-jobs": "0",
            "builders": "",
            "accept-flake-config": "false",
            "warn-dirty": "false",
        }

    def _argv(self, store: str | None, options: Mapping[str, str]) -> tuple[str, ...]:
        argv = [str(self.nix), "repl", "--extra-experimental-features", "nix-command flakes"]
        argv += ["--log-format", "raw"]
        argv += ["--show-trace"] if self.show_trace else []
        argv += ["--store", store] if store else []
        for name, setting in options.items():
            argv += ["--option", name, setting]
        return tuple(argv)

    def _child_environment(self) -> dict[str, str]:
        passed = {name: self.environment[name] for name in _PASSED_ON if name in self.environment}
        home = str(self.home)
        return passed | {
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/cache",
            "XDG_CONFIG_HOME": f"{home}/config",
            "XDG_DATA_HOME": f"{home}/data",
            "XDG_STATE_HOME": f"{home}/state",
            "NIX_USER_CONF_FILES": "",
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }
