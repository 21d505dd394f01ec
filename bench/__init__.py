"""Measurements against Nix itself, run by `scripts/bench`. Not part of the product."""
