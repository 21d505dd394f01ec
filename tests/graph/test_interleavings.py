"""Two sessions in every order: no deadlock, and the end is that of one after the other (invariant 20).

Seeds against flips, the fold against transitions, a claim against what takes the build back, an abort against
a completion. What moves the graph runs under the graph lock (docs/adr/0023); the fold and the recount run
beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest

from gradient.graph.assignments import ClaimBuild
from gradient.graph.build_failures import BuildFailed
from gradient.graph.builds import BuildCompleted, BuildStarted
from gradient.graph.counters import fold_shared_build_deltas, recount_evaluations
from gradient.graph.demote import DemotePath
from gradient.graph.evaluation_build import AbortBuild, RetryBuild
from gradient.graph.evaluation_end import AbortEvaluation, finish_evaluations
from gradient.graph.evaluation_reports import EvalStreamCompleted
from gradient.graph.nar import CommitNars
from gradient.graph.pg import Connection, fetch_all
from gradient.graph.record import Record
from gradient.graph.requeue import LoseWorker, ReturnAssignment
from gradient.graph.transaction import Message, Rejected, graph_transaction
from gradient.model import EntryPoint, FailureKind, OutputPath
from tests.graph.interleaving import Act, Table
from tests.graph.world import COUNTERS, LIMITS, START, WORKER, World, derivation, drv, hash_part, nar, out
from tests.turns import Order, Outcome, every_order

# Everything a message can move, without times and without numbers that count messages.
STATE = {
    "builds": """
        SELECT d.name, b.status, b.cache_available, b.substituted, b.fetchable, b.wanted, b.blocking_deps,
               b.missing_runtime_deps, b.attempt, d.walked, d.unwalked_inputs
        FROM derivation d LEFT JOIN derivation_build b ON b.derivation = d.id ORDER BY d.name
    """,
    "edges": """
        SELECT a.name, i.name, e.kind FROM derivation_dependency e JOIN derivation a ON a.id = e.derivation
        JOIN derivation i ON i.id = e.dependency ORDER BY 1, 2
    """,
    "outputs": "SELECT hash, name, is_cached FROM derivation_output ORDER BY hash, name, derivation",
    "names": """
        SELECT j.evaluation, d.name, j.aborted FROM build_job j JOIN derivation d ON d.id = j.derivation
        ORDER BY 1, 2
    """,
    "jobs": "SELECT job_id, outcome, abort_sent_at IS NULL FROM dispatched_job ORDER BY 1, 2, 3",
    "attempts": "SELECT derivation, outcome, reason FROM build_attempt ORDER BY 1, 2, 3",
    "messages": "SELECT evaluation, level, message FROM evaluation_message ORDER BY 1, 2, 3",
    "counters": COUNTERS,
}
# Later than anything here was committed.
NEVER = START + timedelta(days=365)
End: TypeAlias = str
Scenario: TypeAlias = Callable[[World], Awaitable[tuple[Act, Act]]]


async def end(table: Table, outcome: Outcome) -> End:
    """What the database and the answers are now."""
    found = {what: await fetch_all(table.monitor, query) for what, query in STATE.items()}
    lines = [f"{what}: {row}" for what, rows in found.items() for row in rows]
    return "\n".join([f"answers: {outcome.answers}", *lines])


async def check_every_order(url: str, scenario: Scenario, switches: int = 2) -> list[Order]:
    """Play them; those that there were."""
    async with await Connection.connect(url) as connection:
        world = World(connection)
        await world.setup()
        acts = await scenario(world)
    async with Table.laid(url) as table:
        serial: set[End] = set()
        for second_begins in (False, True):
            outcome = await table.play(acts, Order(second_begins, 1000, 0))
            assert outcome.errors == (None, None)
            await World(table.monitor).check()
            serial.add(await end(table, outcome))

        tried: list[Order] = []

        async def played(order: Order) -> Outcome:
            outcome = await table.play(acts, order)
            assert outcome.errors == (None, None), outcome
            found = await end(table, outcome)
            assert found in serial, f"{order} ends as no order of one after the other:\n{found}"
            tried.append(order)
            return outcome

        await every_order(played, switches)
    # Both begin, and are interrupted: otherwise nothing was shown.
    assert {order.second_begins for order in tried} == {False, True}
    assert max(order.before for order in tried) > 2
    return tried


def applied(message: Message[Any]) -> Act:
    """As the writer applies it; answers that number something are told by their being there."""

    async def act(connection: Connection) -> Any:
        try:
            async with graph_transaction(connection, START + timedelta(days=1)) as tx:
                answer = await message.apply(tx)
                await finish_evaluations(tx)
        except Rejected as refusal:
            return f"refused: {refusal}"
        return answer is not None if isinstance(message, ClaimBuild) else answer

    return act


async def fold(connection: Connection) -> None:
    await fold_shared_build_deltas(connection)


# --- seeds against flips --------------------------------------------------------------------------


async def a_batch_and_the_completion_of_its_input(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    await world.start("lib")
    await world.commit(nar(out("lib")), nar(drv("top")))
    batch = Record(evaluation, (derivation("top", ["lib"]),), (EntryPoint("top", drv("top")),))
    return applied(batch), applied(BuildCompleted(world.open["lib"], LIMITS))


async def a_batch_and_the_nar_that_what_it_holds_refers_to(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.commit(nar(out("app"), [out("lib")]), nar(drv("app")), nar(drv("user")))
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    batch = Record(
        evaluation, (derivation("app"), derivation("user", ["app"])), (EntryPoint("user", drv("user")),)
    )
    return applied(batch), applied(CommitNars(1, (nar(out("lib")),)))


async def two_batches_that_meet(world: World) -> tuple[Act, Act]:
    """One walks what the other has found unwalked."""
    first, second = await world.evaluation(), await world.evaluation()
    await world.commit(*(nar(drv(name)) for name in ("top", "mid", "low")))
    upper = Record(first, (derivation("top", ["mid"]),), (EntryPoint("top", drv("top")),))
    lower = Record(second, (derivation("mid", ["low"]), derivation("low")), (EntryPoint("mid", drv("mid")),))
    return applied(upper), applied(lower)


async def two_nars_that_refer_to_each_other_in_a_chain(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": [], "lib": [], "user": ["app"]}, entries=["app", "lib", "user"])
    return (
        applied(CommitNars(1, (nar(out("app"), [out("lib")]),))),
        applied(CommitNars(1, (nar(out("lib")),))),
    )


async def two_completions_below_one_build(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a", "b"], "a": [], "b": []}, entries=["top"])
    await world.end_stream(evaluation)
    for name in ("a", "b"):
        await world.start(name)
        await world.commit(nar(out(name)))
    return tuple(applied(BuildCompleted(world.open[name], LIMITS)) for name in ("a", "b"))  # type: ignore[return-value]


async def a_batch_and_the_loss_of_its_input(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"lib": []}, entries=["lib"])
    await world.build("lib")
    await world.commit(nar(drv("top")))
    batch = Record(evaluation, (derivation("top", ["lib"]),), (EntryPoint("top", drv("top")),))
    return applied(batch), applied(DemotePath((hash_part("lib"),), NEVER))


async def a_nar_and_the_loss_of_what_it_refers_to(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"app": [], "lib": [], "user": ["app"]}, entries=["app", "lib", "user"])
    await world.build("lib")
    return (
        applied(CommitNars(1, (nar(out("app"), [out("lib")]),))),
        applied(DemotePath((hash_part("lib"),), NEVER)),
    )


# --- the fold against transitions -----------------------------------------------------------------


async def about_to_end(world: World) -> int:
    """An evaluation whose last build runs, with unfolded deltas."""
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["a"], "a": []}, entries=["top"])
    await world.end_stream(evaluation)
    await world.build("a")
    await world.start("top")
    await world.commit(nar(out("top")))
    return evaluation


async def the_fold_and_the_last_completion(world: World) -> tuple[Act, Act]:
    await about_to_end(world)
    return fold, applied(BuildCompleted(world.open["top"], LIMITS))


async def the_fold_and_a_batch(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"a": []}, entries=["a"])
    batch = Record(evaluation, (derivation("b", ["a"]),), (EntryPoint("b", drv("b")),))
    return fold, applied(batch)


async def the_fold_and_the_end_of_a_stream(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"b": ["a"], "a": []}, entries=["b"])
    return fold, applied(EvalStreamCompleted(world.open[f"eval:{evaluation}"]))


async def a_recount_and_a_completion(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)

    async def recount(connection: Connection) -> None:
        await recount_evaluations(connection, [evaluation])

    return recount, applied(BuildCompleted(world.open["top"], LIMITS))


async def two_folds(world: World) -> tuple[Act, Act]:
    await about_to_end(world)
    return fold, fold


# --- a claim against what takes the build back ----------------------------------------------------


async def queued(world: World) -> tuple[int, Act]:
    evaluation = await world.evaluation()
    outputs = (OutputPath("out", out("top")), OutputPath("dev", out("top", "dev")))
    await world.record(evaluation, {"late": []}, entries=["late"])
    await world.record(evaluation, {"top": []}, entries=["top"], outputs=outputs)
    return evaluation, applied(ClaimBuild(await world.id("top"), False, WORKER, "w"))


async def a_claim_and_a_new_dependency(world: World) -> tuple[Act, Act]:
    _, claim = await queued(world)
    return claim, applied(CommitNars(1, (nar(out("top"), [out("late")]),)))


async def a_claim_and_an_abort(world: World) -> tuple[Act, Act]:
    evaluation, claim = await queued(world)
    return claim, applied(AbortEvaluation(evaluation, "by a person"))


async def a_claim_and_the_loss_of_an_input(world: World) -> tuple[Act, Act]:
    evaluation = await world.evaluation()
    await world.record(evaluation, {"top": ["lib"], "lib": []}, entries=["top"])
    await world.end_stream(evaluation)
    await world.build("lib")
    claim = applied(ClaimBuild(await world.id("top"), False, WORKER, "w"))
    return claim, applied(DemotePath((hash_part("lib"),), NEVER))


async def a_claim_and_an_abort_of_the_build(world: World) -> tuple[Act, Act]:
    evaluation, claim = await queued(world)
    return claim, applied(AbortBuild(await world.id("top"), evaluation, "somebody"))


async def two_claims_of_one_build(world: World) -> tuple[Act, Act]:
    _, claim = await queued(world)
    return claim, claim


async def a_claim_and_its_outputs(world: World) -> tuple[Act, Act]:
    _, claim = await queued(world)
    return claim, applied(CommitNars(1, (nar(out("top")), nar(out("top", "dev")))))


async def a_claim_and_a_decline_of_the_one_before(world: World) -> tuple[Act, Act]:
    _, claim = await queued(world)
    await world.claim("top")
    return claim, applied(ReturnAssignment(world.open["top"]))


# --- an abort against a completion ----------------------------------------------------------------


async def an_abort_and_the_last_completion(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)
    return (
        applied(AbortEvaluation(evaluation, "by a person")),
        applied(BuildCompleted(world.open["top"], LIMITS)),
    )


async def an_abort_and_a_completion_below_what_others_want(world: World) -> tuple[Act, Act]:
    first, second = await world.evaluation(), await world.evaluation()
    graph = {"shared": ["low"], "low": []}
    await world.record(first, {"own": ["shared"], **graph}, entries=["own"])
    await world.record(second, {"other": ["shared"], **graph}, entries=["other"])
    await world.end_stream(first)
    await world.end_stream(second)
    await world.start("low")
    await world.commit(nar(out("low")))
    return (
        applied(AbortEvaluation(first, "by a person")),
        applied(BuildCompleted(world.open["low"], LIMITS)),
    )


async def an_abort_and_a_failure(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)
    failure = BuildFailed(world.open["top"], FailureKind.PERMANENT, "it broke", LIMITS)
    return applied(AbortEvaluation(evaluation, "by a person")), applied(failure)


async def an_abort_and_a_lost_worker(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)
    return applied(AbortEvaluation(evaluation, "by a person")), applied(LoseWorker(WORKER))


async def an_abort_and_a_start(world: World) -> tuple[Act, Act]:
    evaluation, _ = await queued(world)
    await world.claim("top")
    return (
        applied(AbortEvaluation(evaluation, "by a person")),
        applied(BuildStarted(world.open["top"])),
    )


async def an_abort_and_a_batch_that_wants_the_same(world: World) -> tuple[Act, Act]:
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"own": ["shared"], "shared": []}, entries=["own"])
    await world.start("shared")
    batch = Record(second, (derivation("other", ["shared"]),), (EntryPoint("other", drv("other")),))
    return applied(AbortEvaluation(first, "by a person")), applied(batch)


async def an_abort_of_a_build_and_its_completion(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)
    abort = AbortBuild(await world.id("top"), evaluation, "somebody")
    return applied(abort), applied(BuildCompleted(world.open["top"], LIMITS))


async def an_abort_of_a_build_and_a_batch_that_names_it(world: World) -> tuple[Act, Act]:
    first, second = await world.evaluation(), await world.evaluation()
    await world.record(first, {"own": ["shared"], "shared": []}, entries=["own"])
    await world.start("shared")
    batch = Record(second, (derivation("other", ["shared"]),), (EntryPoint("other", drv("other")),))
    return applied(AbortBuild(await world.id("shared"), first, "somebody")), applied(batch)


async def a_retry_and_the_late_report_of_the_abort(world: World) -> tuple[Act, Act]:
    evaluation = await about_to_end(world)
    top = await world.id("top")
    await world.apply(AbortBuild(top, evaluation, "somebody"))
    stopped = BuildFailed(world.open["top"], FailureKind.ABORTED, "aborted", LIMITS)
    return applied(RetryBuild(top, evaluation, "somebody")), applied(stopped)


SCENARIOS: tuple[Scenario, ...] = (
    a_batch_and_the_loss_of_its_input,
    a_nar_and_the_loss_of_what_it_refers_to,
    a_claim_and_the_loss_of_an_input,
    a_claim_and_an_abort_of_the_build,
    an_abort_of_a_build_and_its_completion,
    an_abort_of_a_build_and_a_batch_that_names_it,
    a_retry_and_the_late_report_of_the_abort,
    a_batch_and_the_completion_of_its_input,
    a_batch_and_the_nar_that_what_it_holds_refers_to,
    two_batches_that_meet,
    two_nars_that_refer_to_each_other_in_a_chain,
    two_completions_below_one_build,
    the_fold_and_the_last_completion,
    the_fold_and_a_batch,
    the_fold_and_the_end_of_a_stream,
    a_recount_and_a_completion,
    two_folds,
    a_claim_and_a_new_dependency,
    a_claim_and_an_abort,
    two_claims_of_one_build,
    a_claim_and_its_outputs,
    a_claim_and_a_decline_of_the_one_before,
    an_abort_and_the_last_completion,
    an_abort_and_a_completion_below_what_others_want,
    an_abort_and_a_failure,
    an_abort_and_a_lost_worker,
    an_abort_and_a_start,
    an_abort_and_a_batch_that_wants_the_same,
)


# Those in which one goes on beside the other. Where both move the graph, the other waits for all of the first
# at its first step: there is no third switch.
BESIDE: tuple[Scenario, ...] = (
    the_fold_and_the_last_completion,
    the_fold_and_a_batch,
    the_fold_and_the_end_of_a_stream,
    a_recount_and_a_completion,
    two_folds,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_every_order_ends_as_a_serial_one(database_url: str, scenario: Scenario) -> None:
    await check_every_order(database_url, scenario)


@pytest.mark.full
@pytest.mark.parametrize("scenario", BESIDE, ids=lambda scenario: scenario.__name__)
async def test_every_order_with_three_switches_ends_as_a_serial_one(
    database_url: str, scenario: Scenario
) -> None:
    tried = await check_every_order(database_url, scenario, 3)
    assert any(order.again for order in tried)


async def test_a_deadlock_would_be_found(database_url: str) -> None:
    """Two sessions that lock two rows the other way round."""

    def locking(*evaluations: int) -> Act:
        async def act(connection: Connection) -> None:
            async with connection.transaction():
                for evaluation in evaluations:
                    await fetch_all(connection, f"SELECT FROM evaluation WHERE id = {evaluation} FOR UPDATE")

        return act

    async def scenario(world: World) -> tuple[Act, Act]:
        first, second = await world.evaluation(), await world.evaluation()
        return locking(first, second), locking(second, first)

    with pytest.raises(AssertionError, match="deadlock detected"):
        await check_every_order(database_url, scenario)
