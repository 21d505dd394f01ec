"""What the design names is named so: functions, statements, columns, bodies of the schema.

Source: seed "Queueing and Counters".
"""

from __future__ import annotations

import importlib
import pkgutil

import gradient.graph
from gradient.graph.pg import Connection, fetch_all

# Functions, predicates and statements.
NAMES = """
    became_fetchable lost_fetchability lock_shared_builds SharedBuildLock seed_blocking_deps promote
    promote_closure unpromote_ungated repair_can_start repair_fetchable RIPPLE_UP claim_assignment
    update_need settle_need update_and_settle_need thaw_wanted skip_unwanted settle_skipped recount_wanted
    WRITE_NEED open_closure_cte_body release_evaluation_need unwalk_derivations demote_cached_output
    settle_after_delete adopt_pending_closure adopt_pending_closures pending_orphan_frontier
    cascade_dependency_failed repair_dependency_failed repair_build_graph RETRY_BUILD_CLOSURE
    check_evaluation_done eval_counters eval_blocked recount_evaluations fold_shared_build_deltas
    graph_consistency_report shared_build_complete_predicate gates_predicate promotable_predicate
    drv_present_predicate open_predicate builder_predicate non_passthrough_predicate blocks_evaluation
"""
# Functions and triggers of the database.
BODIES = """
    ripple_missing_runtime_deps ripple_unwalked_inputs evaluation_shared_build_counts
    evaluation_shared_build_moved evaluation_shared_build_named evaluation_shared_build_unnamed
"""
COLUMNS = """
    derivation.walked derivation.unwalked_inputs derivation_build.status derivation_build.attempt
    derivation_build.missing_runtime_deps derivation_build.fetchable derivation_build.blocking_deps
    derivation_build.wanted derivation_build.probed derivation_build.cache_available build_job.aborted
    derivation_dependency.kind evaluation.named_shared_builds evaluation.active_shared_builds
    evaluation.failed_shared_builds evaluation.queued_shared_builds evaluation.building_shared_builds
    evaluation_shared_build_delta.evaluation
"""


async def test_things_have_the_names_of_the_design(connection: Connection) -> None:
    defined = {
        name
        for module in pkgutil.iter_modules(gradient.graph.__path__, "gradient.graph.")
        for name in vars(importlib.import_module(module.name))
    }
    assert set(NAMES.split()) - defined == set()
    bodies = await fetch_all(
        connection,
        """
        SELECT proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
        UNION SELECT tgname FROM pg_trigger
        """,
    )
    assert set(BODIES.split()) - {row[0] for row in bodies} == set()
    columns = await fetch_all(
        connection,
        """
        SELECT table_name || '.' || column_name FROM information_schema.columns
        WHERE table_schema = current_schema()
        """,
    )
    assert set(COLUMNS.split()) - {row[0] for row in columns} == set()
