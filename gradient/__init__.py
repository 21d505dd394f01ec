"""Gradient: a Nix CI. The README says how the parts fit; `serve.py` and `work.py` are the roots."""

__version__ = "0.1.0"
