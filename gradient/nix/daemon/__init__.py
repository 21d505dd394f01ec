"""The Nix daemon protocol: the client, and the proxy an evaluator child talks to. Layer: rank 1."""
