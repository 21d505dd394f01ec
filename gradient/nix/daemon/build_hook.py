"""A build hook that declines everything: builds stay on this machine. Layer: rank 1, IO at start only.

Before it builds, Nix asks its build hook whether another machine will, and a daemon starts that program, a
`nix` of its own, anew for every request: 17 ms of CPU time against 9 ms for all the rest of a small build
(docs/adr/0018). An empty `build-hook` asks nobody, but older Nix (2.8) takes it for a program that fails.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

# A hook answers on stderr; this answer holds for the rest of the request. It goes when Nix hangs up: had it
# gone before Nix has put its question, a build's log would say that it died.
_SCRIPT: Final = "#!/bin/sh\necho '# decline-permanently' >&2\nread -r _ || :\n"


def declining_hook(file: Path) -> tuple[tuple[str, str], ...]:
    """Write the hook to `file` (absolute); the settings (`DaemonOptions.extra`) of connections that use it.

    Empty where the daemon could not run it: Nix takes blanks for the ends of words, and a file system may
    be mounted `noexec`. A daemon that does not trust us goes on asking the hook of its own configuration.
    Blocking, short. Raises OSError when the file cannot be written.
    """
    file.write_text(_SCRIPT)
    file.chmod(0o755)
    if any(map(str.isspace, str(file))) or not os.access(file, os.X_OK):
        return ()
    return (("build-hook", str(file)),)
