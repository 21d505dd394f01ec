"""What can go wrong with an evaluator child, one class per cause. Layer: rank 1, pure."""

from __future__ import annotations


class EvaluatorError(Exception):
    """Evaluation failed; the message says why."""


class EvaluationFailed(EvaluatorError):
    """Nix refused the expression. The message is Nix's own; the child lives on."""


class ChildDied(EvaluatorError):
    """The child ended before it answered, or was ended because it broke a limit. It is never used again.

    `message` names the cause in words; the last words of the child follow when there were any.
    """


class EvaluatorUnusable(EvaluatorError):
    """No child can be started at all: no such program, not a Nix, or one that refuses our options."""
