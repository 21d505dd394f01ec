"""The pool of persistent `nix repl` children. Layer: rank 1."""
