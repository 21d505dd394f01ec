"""Gradient: a Nix CI. `docs/` and the README say how the parts fit; `serve.py` and `work.py` are the roots."""

__version__ = "0.1.0"
