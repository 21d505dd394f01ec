"""HTTP for people and for Nix: the API, the binary cache, pages, live events. Layer: rank 5."""
