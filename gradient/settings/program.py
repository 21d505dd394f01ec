"""How the user calls us: hints are commands that can be typed as they stand. Layer: rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

# Set by scripts/gradient and scripts/run, which alone know their names.
PROGRAM_VARIABLE: Final = "GRADIENT_PROGRAM"


def program() -> str:
    """`gradient`, or how this process was called where it is not on PATH."""
    as_module = Path(sys.argv[0]).parts[-2:] == ("gradient", "__main__.py")
    return os.environ.get(PROGRAM_VARIABLE) or ("python -m gradient" if as_module else "gradient")
