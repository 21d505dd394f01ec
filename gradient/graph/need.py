"""The needs-build mark: which shared builds some open entry point still wants. Layer: graph.

The mark flows down from the entry points while the counters of `can_start` flow up from the leaves.
`update_need` and `settle_need` stay inside `graph/`; other packages call `update_and_settle_need`.
Source: seed "Queueing and Counters", Needs Build, Skipped and Thaw.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from gradient.graph.can_start import became_fetchable, clear_fetchable, promote, unpromote_ungated
from gradient.graph.locks import SharedBuildLock, lock_shared_builds
from gradient.graph.moves import BuildChange
from gradient.graph.predicates import (
    aborted_in_live,
    any_of,
    held_by_abort,
    open_predicate,
    steps_over,
    wanting_entry_point,
)
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import BUILDER_STATUSES, BuildStatus

_FROZEN: Final = frozenset({BuildStatus.SKIPPED, BuildStatus.ABORTED})


def _thaws(b: str) -> str:
    """Waits again as soon as it is needed: Skipped, or Aborted unless that abort holds."""
    return f"({any_of(f'{b}.status', _FROZEN)} AND NOT {held_by_abort(b)})"


def out_of_place_predicate(b: str = "b") -> str:
    """Skipped or Aborted and wanted all the same, or Created with nobody to want it."""
    return (
        f"(({b}.wanted AND {_thaws(b)})"
        f" OR ({any_of(f'{b}.status', {BuildStatus.CREATED})} AND NOT {b}.wanted"
        f" AND NOT {wanting_entry_point(f'{b}.derivation')}))"
    )


def open_closure_cte_body(
    seeds: str, into: str = "", within: str = "", *, carried: str = "", onward: str = ""
) -> str:
    """The one walk behind the needs-build mark and naming, as the body of a recursive CTE `reached`.

    `seeds` selects the derivations to start from. From each row reached the walk steps over runtime
    edges, and over build edges when the row is a builder; it reaches only open rows, so a passthrough
    is reached and its build inputs are not. `into` narrows the rows reached (alias `b`) as each is looked
    at, `within` a whole level of them at a time (alias `below`). `carried` is a column of `reached` that
    the rows below take over from those above.

    With `onward`, a condition on row `x`, the walk looks whether a row is open and fulfils it only when it
    comes to step from it: once a row instead of once for each row above, which on a whole graph is three
    times as fast. `reached` then has rows too that are not open.
    """
    carry = carried and f"reached.{carried}, "
    last, stop = "b.derivation", "true"
    join = f"JOIN derivation_build b ON b.derivation = e.dependency AND {open_predicate('b')} {into}"
    if onward:
        assert not into
        last, stop, join = "e.dependency AS derivation", f"{open_predicate('x')} AND {onward}", ""
    return f"""
        {seeds}
      UNION
        SELECT {carry}below.derivation FROM reached, LATERAL (
            SELECT {last} FROM derivation_build x
            JOIN derivation xd ON xd.id = x.derivation
            JOIN derivation_dependency e ON e.derivation = x.derivation AND {steps_over("e", "x", "xd")}
            {join}
            WHERE x.derivation = reached.derivation AND {stop} OFFSET 0
        ) below {within}
    """


# OFFSET 0: looked up for each row. For a batch it would else be read once, of everything that is wanted.
_WANTED_FROM_ABOVE = f"""
    EXISTS (SELECT FROM derivation_dependency e
            JOIN derivation_build x ON x.derivation = e.derivation
            JOIN derivation xd ON xd.id = x.derivation
            WHERE e.dependency = b.derivation AND x.wanted AND {open_predicate("x")}
              AND {steps_over("e", "x", "xd")} OFFSET 0)
"""
# Of the rows of the CTE `area`, all of them open, those that are wanted: from entry points in it and from
# wanted rows outside.
_WANTED_INSIDE = f"""
    wanted_outside AS MATERIALIZED (
        SELECT area.derivation FROM area WHERE EXISTS (
            SELECT FROM derivation_dependency e
            JOIN derivation_build x ON x.derivation = e.derivation
            JOIN derivation xd ON xd.id = x.derivation
            WHERE e.dependency = area.derivation AND x.wanted AND {open_predicate("x")}
              AND {steps_over("e", "x", "xd")} AND e.derivation NOT IN (SELECT i.derivation FROM area i)
            OFFSET 0)
    ), reached (derivation) AS (
        {
    open_closure_cte_body(
        f'''SELECT b.derivation FROM area JOIN derivation_build b USING (derivation)
            WHERE {open_predicate("b")} AND (b.derivation IN (SELECT o.derivation FROM wanted_outside o)
                  OR {wanting_entry_point("b.derivation")})''',
        within="WHERE (below.derivation IN (SELECT i.derivation FROM area i)) IS TRUE",
        onward="true",
    )
}
    )
"""
# The region that may change below the roots, then what is wanted inside it. Only open rows whose mark
# differs come back: on a row that is done the mark means nothing, and whatever opens it again makes it a
# root. Whether a row is open is looked at when the walk comes to it: once a row, not once for each above.
# Regions of 10,000 rows are real, and nobody can estimate them: NOT IN and IS TRUE keep the planner from
# turning a look into a hash table into a join that reads the whole region for each row.
READ_NEED: Final = Statement(
    "read_need",
    f"""
    WITH RECURSIVE region (derivation, is_root) AS (
        SELECT derivation, true FROM derivation_build WHERE derivation = ANY(%(roots)s)
      UNION
        SELECT below.derivation, false FROM region r, LATERAL (
            SELECT e.dependency AS derivation FROM derivation_build x
            JOIN derivation xd ON xd.id = x.derivation
            JOIN derivation_dependency e ON e.derivation = x.derivation
            WHERE x.derivation = r.derivation AND (r.is_root OR {open_predicate("x")})
              AND (r.is_root OR {steps_over("e", "x", "xd")})
            OFFSET 0
        ) below
    ), area AS MATERIALIZED (
        SELECT b.derivation FROM (SELECT DISTINCT derivation FROM region) AS reachable
        JOIN derivation_build b USING (derivation) WHERE {open_predicate("b")}
    ), {_WANTED_INSIDE}
    SELECT b.derivation, w.derivation IS NOT NULL
    FROM area JOIN derivation_build b USING (derivation) LEFT JOIN reached w USING (derivation)
    WHERE b.wanted <> (w.derivation IS NOT NULL) AND {open_predicate("b")}
    """,
)
# Of rows that the consistency check found wanted by nobody, those of which that is true now: without the
# region below them, whose marks it has seen to be right.
READ_LOST_NEED: Final = Statement(
    "read_lost_need",
    f"""
    WITH RECURSIVE area AS MATERIALIZED (
        SELECT b.derivation FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND b.wanted AND {open_predicate("b")}
    ), {_WANTED_INSIDE}
    SELECT area.derivation, false FROM area LEFT JOIN reached w USING (derivation)
    WHERE w.derivation IS NULL LIMIT %(limit)s
    """,
)
# An event that can only add need (new builders, edges or entry points) walks down through rows that
# are not wanted yet and stops at wanted ones: below those everything is wanted already, unless they are
# among the roots.
READ_GAINED_NEED: Final = Statement(
    "read_gained_need",
    f"""
    WITH RECURSIVE reached (derivation) AS (
        {
        open_closure_cte_body(
            f'''SELECT b.derivation FROM derivation_build b
            WHERE b.derivation = ANY(%(roots)s) AND NOT b.wanted
              AND ({wanting_entry_point("b.derivation")} OR {_WANTED_FROM_ABOVE})
          UNION
            SELECT e.dependency FROM derivation_build x
            JOIN derivation xd ON xd.id = x.derivation
            JOIN derivation_dependency e ON e.derivation = x.derivation AND {steps_over("e", "x", "xd")}
            WHERE x.derivation = ANY(%(roots)s) AND x.wanted AND {open_predicate("x")}''',
            onward="NOT x.wanted",
        )
    }
    )
    SELECT gained.derivation, true FROM reached, LATERAL (
        SELECT b.derivation FROM derivation_build b
        WHERE b.derivation = reached.derivation AND NOT b.wanted AND {open_predicate("b")} OFFSET 0
    ) gained
    """,
)
# Of rows that are builders no more: the ones with something below them left to lose need.
WITH_OPEN_DEPENDENCIES: Final = Statement(
    "with_open_dependencies",
    "SELECT derivation FROM derivation_build WHERE derivation = ANY(%(ids)s) AND blocking_deps > 0",
)
WRITE_NEED: Final = Statement(
    "write_need",
    """
    WITH answer AS (
        SELECT * FROM unnest(%(ids)s::bigint[], %(marks)s::boolean[]) AS a (derivation, wanted)
    ), locked AS (
        SELECT b.derivation FROM derivation_build b JOIN answer a ON a.derivation = b.derivation
        ORDER BY b.derivation FOR NO KEY UPDATE OF b
    )
    UPDATE derivation_build b SET wanted = a.wanted
    FROM answer a JOIN locked l ON l.derivation = a.derivation
    WHERE b.derivation = a.derivation AND b.wanted <> a.wanted
    RETURNING b.derivation, b.wanted
    """,
)
THAW_WANTED: Final = Statement(
    "thaw_wanted",
    f"""
    WITH frozen AS (
        SELECT b.derivation, b.status FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND b.wanted AND {_thaws("b")}
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b
    SET status = {int(BuildStatus.CREATED)}, attempt = 0, updated_at = %(now)s
    FROM frozen f WHERE b.derivation = f.derivation
    RETURNING b.derivation, f.status
    """,
)
SKIP_UNWANTED: Final = Statement(
    "skip_unwanted",
    f"""
    UPDATE derivation_build b SET status = {int(BuildStatus.SKIPPED)}, updated_at = %(now)s
    WHERE b.derivation = ANY(%(ids)s) AND b.status = {int(BuildStatus.CREATED)} AND NOT b.wanted
      AND NOT {wanting_entry_point("b.derivation")}
    RETURNING b.derivation
    """,
)
# What was aborted before and this evaluation needs waits again. What it has no need for is no failure of
# this one: settled as what nobody needs; only an abort for another live evaluation stays, as its failure.
SETTLE_ABORTED: Final = Statement(
    "settle_aborted",
    f"""
    WITH aborted AS (
        SELECT b.derivation, b.wanted FROM derivation_build b
        WHERE b.derivation = ANY(%(ids)s) AND b.status = {int(BuildStatus.ABORTED)}
          AND CASE WHEN b.wanted THEN NOT {held_by_abort("b")} ELSE NOT {aborted_in_live("b.derivation")} END
        ORDER BY b.derivation FOR NO KEY UPDATE
    )
    UPDATE derivation_build b
    SET status = CASE WHEN a.wanted THEN {int(BuildStatus.CREATED)} ELSE {int(BuildStatus.SKIPPED)} END,
        attempt = CASE WHEN a.wanted THEN 0 ELSE b.attempt END, updated_at = %(now)s
    FROM aborted a WHERE b.derivation = a.derivation
    RETURNING b.derivation, b.status
    """,
)


@attrs.frozen
class NeedChange:
    """Shared builds that gained or lost the needs-build mark."""

    gained: tuple[int, ...]
    lost: tuple[int, ...]


async def update_need(tx: Transaction, roots: Collection[int], *, only_gains: bool = False) -> NeedChange:
    """Recompute the mark below `roots`, roots included, and write the rows that changed.

    `only_gains` is for events that cannot take need away from anything. A `settle_need` call must follow.
    """
    if not roots:
        return NeedChange((), ())
    read = READ_GAINED_NEED if only_gains else READ_NEED
    return await _write_need(tx, await tx.rows(read, roots=ordered(roots)))


async def _write_need(tx: Transaction, answer: list[tuple[int, bool]]) -> NeedChange:
    if not answer:
        return NeedChange((), ())
    answer.sort()
    changed = await tx.rows(WRITE_NEED, ids=[i for i, _ in answer], marks=[mark for _, mark in answer])
    return NeedChange(
        tuple(i for i, wanted in changed if wanted), tuple(i for i, wanted in changed if not wanted)
    )


async def settle_need(tx: Transaction, change: NeedChange) -> list[int]:
    """Apply a move of the mark: gained rows thaw, then queue; lost rows leave the queue, then skip.

    Returns the thawed rows: they are builders again, so the need below them is due.
    """
    thawed: list[int] = []
    if change.gained:
        thawed = await _thaw(tx, change.gained)
        await promote(tx, change.gained)
    if change.lost:
        tx.moves.unsettled.update(change.lost)
        await unpromote_ungated(tx, change.lost)
        await skip_unwanted(tx, change.lost)
    return thawed


async def _thaw(tx: Transaction, ids: Collection[int]) -> list[int]:
    rows = await tx.rows(THAW_WANTED, ids=ordered(ids), now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus(old), BuildStatus.CREATED) for i, old in rows)
    return [i for i, _ in rows]


async def thaw_wanted(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Those of `ids` that are Skipped or Aborted and still wanted become Created and queue; returns them."""
    thawed = await _thaw(tx, ids)
    await _wait_again(tx, thawed)
    return thawed


async def _wait_again(tx: Transaction, thawed: Collection[int]) -> None:
    await update_and_settle_need(tx, thawed, only_gains=True)
    await settle_held(tx, thawed)
    await promote(tx, thawed)


async def skip_unwanted(tx: Transaction, ids: Collection[int]) -> list[int]:
    """Created rows that nobody needs and that are no entry point become Skipped: settled work."""
    if not ids:
        return []
    skipped = await tx.ids(SKIP_UNWANTED, ids=ordered(ids), now=tx.now)
    tx.moves.change(BuildChange(i, BuildStatus.CREATED, BuildStatus.SKIPPED) for i in skipped)
    return skipped


async def settle_aborted(tx: Transaction, ids: Collection[int]) -> None:
    """Rows that were aborted before a live evaluation named them wait again where they are needed, and
    become Skipped where they are not."""
    if ids:
        rows = await tx.rows(SETTLE_ABORTED, ids=ordered(ids), now=tx.now)
        changes = [BuildChange(i, BuildStatus.ABORTED, BuildStatus(new)) for i, new in rows]
        tx.moves.change(changes)
        await _wait_again(tx, [c.derivation for c in changes if c.new is BuildStatus.CREATED])
        # An Aborted row stays one when its last NAR lands; a Skipped one does not.
        await settle_held(tx, [c.derivation for c in changes if c.new is BuildStatus.SKIPPED])


async def update_and_settle_need(
    tx: Transaction, roots: Collection[int], *, only_gains: bool = False
) -> None:
    """Move the mark below `roots` and settle it, down to the last thawed row."""
    due: Collection[int] = roots
    while due:
        due = await settle_need(tx, await update_need(tx, due, only_gains=only_gains))
        only_gains = True
        await settle_held(tx, due)


async def lost_fetchability(tx: Transaction, lock: SharedBuildLock, ids: Collection[int]) -> None:
    """Those of `ids` that are fetchable no more block what needs them, take it out of the queue, and want
    again what they refer to."""
    await update_and_settle_need(tx, await clear_fetchable(tx, lock, ids))


async def settle_held(tx: Transaction, ids: Collection[int]) -> None:
    """Those of `ids` that wait again though their last NAR has landed meanwhile need no build."""
    if ids:
        held = await became_fetchable(tx, await lock_shared_builds(tx, ids), ids)
        await update_and_settle_need(tx, held)


async def need_after(tx: Transaction, changes: Collection[BuildChange]) -> None:
    """The emitter's part: a transition into or out of BUILDER_STATUSES moves the need below it."""
    left = [c.derivation for c in changes if c.old in BUILDER_STATUSES and c.new not in BUILDER_STATUSES]
    joined = [c.derivation for c in changes if c.old not in BUILDER_STATUSES and c.new in BUILDER_STATUSES]
    await update_and_settle_need(tx, joined, only_gains=True)
    if left:
        await update_and_settle_need(tx, await tx.ids(WITH_OPEN_DEPENDENCIES, ids=ordered(left)))


# --- for the consistency check --------------------------------------------------------------------


async def recount_wanted(tx: Transaction, suspects: Collection[int], limit: int) -> list[int]:
    """Write the marks of `suspects`, which are every row whose mark is wrong, and settle them.

    Returns the rows it changed, at most `limit`: fewer mean that all is done. What a transition moved since
    the suspects were found is not changed, because the marks around them are read as they are now.
    """
    ids = ordered(suspects)
    lost = await _write_need(tx, await tx.rows(READ_LOST_NEED, ids=ids, limit=limit))
    await settle_need(tx, lost)
    left = limit - len(lost.lost)
    gained = await _write_need(tx, (await tx.rows(READ_GAINED_NEED, roots=ids))[:left])
    thawed = await settle_need(tx, gained)
    await settle_held(tx, thawed)
    await update_and_settle_need(tx, thawed, only_gains=True)
    return [*lost.lost, *gained.gained]


async def settle_skipped(tx: Transaction, ids: Collection[int]) -> int:
    """The backstop of skip and thaw: settle those of `ids` whose status contradicts their mark; how many."""
    thawed = await thaw_wanted(tx, ids)
    return len(thawed) + len(await skip_unwanted(tx, ids))
