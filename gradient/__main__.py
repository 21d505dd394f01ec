"""`python -m gradient` and the `gradient` script."""

from __future__ import annotations

from gradient.cli.app import main

if __name__ == "__main__":
    main()
