"""`derivation.unwalked_inputs`: how far the walk of a derivation's subtree has come. Layer: graph.

A subtree is recorded when the derivation is walked and its count is 0; the worker's walk stops there.
Source: seed "Queueing and Counters", Walk Completeness.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gradient.graph.can_start import unpromote_ungated
from gradient.graph.need import update_and_settle_need
from gradient.graph.predicates import any_of, build_edge, recorded_predicate
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import EVALUATION_RUNNING


def count_unwalked_inputs(derivation: str) -> str:
    """What `unwalked_inputs` of this derivation must say."""
    return f"""(
        SELECT count(*)::integer FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
        WHERE e.derivation = {derivation} AND {build_edge("e")} AND NOT {recorded_predicate("i")}
    )"""


# Rows of `fresh` count as incomplete on both sides: each one that turns out complete is then spread
# like any other flip. Returns the count before and after, so that only transitions spread.
SEED_UNWALKED_INPUTS: Final = Statement(
    "seed_unwalked_inputs",
    f"""
    WITH locked AS (
        SELECT d.id, d.unwalked_inputs AS before FROM derivation d
        WHERE d.id = ANY(%(ids)s) ORDER BY d.id FOR NO KEY UPDATE
    ), counted AS (
        SELECT l.id, l.before, (
            SELECT count(*) FROM derivation_dependency e JOIN derivation i ON i.id = e.dependency
            WHERE e.derivation = l.id AND {build_edge("e")}
              AND NOT ({recorded_predicate("i")} AND i.id <> ALL(%(fresh)s))
        )::integer AS after
        FROM locked l
    ), written AS (
        UPDATE derivation d SET unwalked_inputs = c.after FROM counted c
        WHERE d.id = c.id AND c.after <> c.before
    )
    SELECT id, before, after FROM counted
    """,
)
RIPPLE_UNWALKED_INPUTS: Final = Statement(
    "ripple_unwalked_inputs", "SELECT ripple_unwalked_inputs(%(frontier)s, %(direction)s)"
)
# For the consistency check: absolute, and answered and locked only where the count was wrong; with whether
# the subtree is recorded by the old count and by the new one.
RECOUNT_UNWALKED_INPUTS: Final = Statement(
    "recount_unwalked_inputs",
    f"""
    WITH counted AS (
        SELECT own.id, {count_unwalked_inputs("own.id")} AS unwalked
        FROM unnest(%(ids)s::bigint[]) AS own (id)
    ), wrong AS (
        SELECT d.id, {recorded_predicate("d")} AS recorded, c.unwalked FROM counted c
        JOIN derivation d USING (id)
        WHERE d.unwalked_inputs <> c.unwalked ORDER BY d.id FOR NO KEY UPDATE OF d
    )
    UPDATE derivation d SET unwalked_inputs = w.unwalked FROM wrong w WHERE d.id = w.id
    RETURNING d.id, w.recorded, {recorded_predicate("d")}
    """,
)
UNWALK_DERIVATIONS: Final = Statement(
    "unwalk_derivations",
    """
    WITH locked AS (
        SELECT d.id FROM derivation d WHERE d.id = ANY(%(ids)s) AND d.walked
        ORDER BY d.id FOR NO KEY UPDATE
    )
    UPDATE derivation d SET walked = false FROM locked l WHERE d.id = l.id
    RETURNING d.id, d.unwalked_inputs = 0
    """,
)
KNOWN_DERIVATIONS: Final = Statement(
    "known_derivations",
    f"""
    SELECT d.hash, d.name, d.id, greatest(d.created_at, d.promised_at) >= %(fresh_since)s
    FROM unnest(%(hashes)s::text[], %(names)s::text[]) AS asked (hash, name)
    JOIN derivation d ON d.hash = asked.hash AND d.name = asked.name
    WHERE {recorded_predicate("d")}
    """,
)
# A walk that is under way has perhaps reported this one, or stopped above it as known.
LOSE_WALKS: Final = Statement(
    "lose_walks",
    f"""
    UPDATE evaluation SET walk_lost = true
    WHERE {any_of("status", EVALUATION_RUNNING)} AND NOT walk_lost
    """,
)


async def seed_unwalked_inputs(tx: Transaction, fresh: Collection[int], grown: Collection[int]) -> None:
    """Count the unwalked inputs of newly walked derivations (`fresh`) and of walked ones that gained a
    build edge (`grown`), and spread what flipped by it, in both directions, however deep."""
    fresh_ids = ordered(fresh)
    rows = await tx.rows(SEED_UNWALKED_INPUTS, ids=ordered({*fresh, *grown}), fresh=fresh_ids)
    newly_walked = set(fresh_ids)
    complete = [i for i, before, after in rows if after == 0 and (i in newly_walked or before > 0)]
    incomplete = [i for i, before, after in rows if after > 0 and before == 0 and i not in newly_walked]
    if incomplete:
        await tx.rows(RIPPLE_UNWALKED_INPUTS, frontier=incomplete, direction=1)
    if complete:
        await tx.rows(RIPPLE_UNWALKED_INPUTS, frontier=complete, direction=-1)


async def unwalk_derivations(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Forget that these were walked, so that the next walk reports them again; returns those that were.

    Everything above them is not completely recorded any more. They can neither start nor need their inputs
    until they are walked again: nothing that somebody waits for may be among them.
    """
    rows = await tx.rows(UNWALK_DERIVATIONS, ids=ordered(ids)) if ids else []
    if not rows:
        return []
    unwalked = ordered(i for i, _ in rows)
    complete = ordered(i for i, was_complete in rows if was_complete)
    if complete:
        await tx.rows(RIPPLE_UNWALKED_INPUTS, frontier=complete, direction=1)
    await tx.run(LOSE_WALKS)
    await unpromote_ungated(tx, unwalked)
    await update_and_settle_need(tx, unwalked)
    return unwalked
