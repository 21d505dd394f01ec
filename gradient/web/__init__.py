"""HTTP for people, Nix clients and workers: the API, the binary cache, uploads, pages. Layer: rank 5."""
