"""Messages of an evaluation, as people read them. Layer: graph, run by the graph writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction
from gradient.model import MessageLevel

# A message is text for a person: longer ones are cut, so that a hostile flake cannot fill the database.
MAX_MESSAGE: Final = 64 * 1024  # characters
MAX_SOURCE: Final = 1024  # characters of an attribute path
# Messages one evaluation may have; the rest is dropped. A broken package set has hundreds.
MAX_MESSAGES: Final = 5000

ADD_MESSAGES: Final = Statement(
    "add_evaluation_messages",
    """
    INSERT INTO evaluation_message (evaluation, level, source, message, created_at)
    SELECT %(evaluation)s, %(level)s, %(source)s, r.message, %(now)s
    FROM unnest(%(messages)s::text[]) WITH ORDINALITY AS r (message, position)
    WHERE (SELECT count(*) FROM evaluation_message m WHERE m.evaluation = %(evaluation)s) < %(limit)s
      AND (%(repeat)s OR NOT EXISTS (
              SELECT FROM evaluation_message m WHERE m.evaluation = %(evaluation)s
              AND m.level = %(level)s AND m.source = %(source)s AND m.message = r.message))
    ORDER BY r.position
    """,
)


async def add_messages(
    tx: Transaction,
    evaluation: int,
    level: MessageLevel,
    source: str,
    messages: Sequence[str],
    *,
    repeat: bool = False,
) -> None:
    """Add messages that are not there yet: a replayed report adds nothing. `repeat`: those of a person's
    acts, who may well do a thing twice."""
    texts = [_clean(message, MAX_MESSAGE) for message in messages[:MAX_MESSAGES]]
    if texts:
        await tx.run(
            ADD_MESSAGES,
            evaluation=evaluation,
            level=level,
            source=_clean(source, MAX_SOURCE),
            messages=texts,
            repeat=repeat,
            now=tx.now,
            limit=MAX_MESSAGES,
        )
        tx.moves.progressed.add(evaluation)


def _clean(text: str, limit: int) -> str:
    return text[:limit].replace("\0", "\N{REPLACEMENT CHARACTER}")


@attrs.frozen
class AddMessage:
    """A message of a running evaluation (writer message). An Error fails the evaluation at its end."""

    evaluation: int
    level: MessageLevel
    source: str
    message: str

    async def apply(self, tx: Transaction) -> None:
        """Add it."""
        await add_messages(tx, self.evaluation, self.level, self.source, [self.message])
