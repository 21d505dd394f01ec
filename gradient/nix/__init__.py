"""Nix's own formats and names, pure: store paths, nix32, hashes, `.drv`, wildcards, flake references, locks.

Layer: rank 0, no IO, no trio. The sub-packages `daemon` and `evaluator` do IO and are rank 1.
"""
