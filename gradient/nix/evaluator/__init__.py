"""Evaluating flakes in a pool of persistent `nix repl` children. Layer: rank 1.

`discover` finds derivations (`discover.py`), with children lent by an `EvaluatorPool` (`pool.py`), each a
`Child` (`child.py`) that is sent expressions (`expressions.py`) and understood by its `Transcript`
(`transcript.py`). `flake.py` opens flakes and fetches their locked inputs.
"""
