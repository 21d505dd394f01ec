"""Primitives of supervision: root nursery, supervised children, periodic passes, drain, stop window.

Layer: rank 0. Knows nothing of Nix or the database; imports trio, attrs and structlog only.
"""
