"""Which attributes to ask about next. Layer: rank 1, pure.

The wildcards decide (`gradient.nix.wildcard_match`); this turns their decisions into questions and keeps
the count of patterns that led to something. Every attribute is asked about once at most.
"""

from __future__ import annotations

from typing import Final

from gradient.nix.evaluator.dead_ends import DeadEnd
from gradient.nix.evaluator.findings import (
    AttrSet,
    Derivation,
    Plain,
    Question,
    Standing,
    TargetUnmatched,
)
from gradient.nix.wildcard import Wildcards
from gradient.nix.wildcard_match import Cursor, NodeKind

# Targets without a derivation whose end is told; nobody reads more of them.
MAX_EXPLAINED: Final = 20


class Survey:
    """The questions of one discovery, in the order in which their answers make them."""

    def __init__(self, wildcards: Wildcards) -> None:
        self._wildcards = wildcards
        self._matched: set[str] = set()
        # Where each target came deepest and no further; the first of such places.
        self._ends: dict[str, DeadEnd] = {}

    def begin(self) -> list[Question]:
        """The first questions."""
        return [_question(Cursor.root(self._wildcards))]

    def heard(self, question: Question, standing: Standing) -> list[Question]:
        """What follows from an answer."""
        decision = question.cursor.decide(_kind(standing))
        self._matched |= decision.taken_by
        self._note_ends(question, standing)
        if isinstance(standing, Plain) or not decision.descend:
            return []
        wanted = decision.names
        names = standing.names if wanted is None else [name for name in standing.names if name in wanted]
        cursors = (decision.enter(name) for name in names)
        return [_question(cursor) for cursor in cursors if cursor is not None]

    def failed(self, question: Question) -> None:
        """The question has no answer. Its targets led to an attribute: that it failed is told elsewhere."""
        self._matched |= question.cursor.decide(NodeKind.DERIVATION).taken_by

    def unmatched(self) -> list[TargetUnmatched]:
        """The targets that have led to no derivation so far."""
        texts = self._wildcards.unmatched(self._matched)
        why = {text: self._ends[text].why for text in texts[:MAX_EXPLAINED] if text in self._ends}
        return [TargetUnmatched(text, why.get(text, "")) for text in texts]

    def _note_ends(self, question: Question, standing: Standing) -> None:
        names = () if isinstance(standing, Plain) else standing.names
        for text, wanted in question.cursor.dead_ends(_kind(standing), names):
            known = self._ends.get(text)
            if known is None or len(known.path) < len(question.path):
                self._ends[text] = DeadEnd(question.path, standing, wanted)


def _question(cursor: Cursor) -> Question:
    if_derivation = cursor.decide(NodeKind.DERIVATION)
    return Question(cursor, instantiate=if_derivation.take, inside=if_derivation.descend)


def _kind(standing: Standing) -> NodeKind:
    match standing:
        case Derivation():
            return NodeKind.DERIVATION
        case AttrSet(typed=True):
            return NodeKind.TYPED
        case AttrSet():
            return NodeKind.SET
        case Plain():
            return NodeKind.OTHER
