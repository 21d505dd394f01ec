"""What a build made: sizes of outputs, products, metrics. Layer: graph.

Source: seed "Jobs", Reports.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Final, Self
from uuid import UUID

import attrs

from gradient.graph.joint import Joint, Stage
from gradient.graph.statements import Statement
from gradient.graph.transaction import Transaction, ordered
from gradient.model import BuildMetrics, BuiltOutput

# Sizes by assignment and output. Answers the open assignments, with what metrics need.
STORE_OUTPUTS: Final = Statement(
    "store_build_outputs",
    """
    WITH job AS (
        SELECT q.id, q.derivation, q.worker_id, r.substituted
        FROM unnest(%(assignments)s::bigint[], %(substituted)s::boolean[]) AS r (assignment, substituted)
        JOIN dispatched_job q ON q.id = r.assignment AND q.finished_at IS NULL
    ), marked AS (
        UPDATE derivation_build b SET substituted = job.substituted FROM job
        WHERE b.derivation = job.derivation AND b.substituted <> job.substituted
    ), sized AS (
        UPDATE derivation_output o SET nar_size = r.nar_size
        FROM job JOIN unnest(%(owners)s::bigint[], %(names)s::text[], %(sizes)s::bigint[])
            AS r (assignment, name, nar_size) ON r.assignment = job.id
        WHERE o.derivation = job.derivation AND o.name = r.name AND o.nar_size IS DISTINCT FROM r.nar_size
          AND r.nar_size IS NOT NULL
    )
    SELECT id, derivation, worker_id FROM job
    """,
)
DROP_PRODUCTS: Final = Statement(
    "drop_build_products", "DELETE FROM build_product WHERE derivation = ANY(%(derivations)s)"
)
INSERT_PRODUCTS: Final = Statement(
    "insert_build_products",
    """
    INSERT INTO build_product (derivation, output, file_type, subtype, name, path, size)
    SELECT * FROM unnest(%(derivations)s::bigint[], %(outputs)s::text[], %(types)s::text[],
                         %(subtypes)s::text[], %(names)s::text[], %(paths)s::text[], %(sizes)s::bigint[])
    """,
)
INSERT_METRICS: Final = Statement(
    "insert_derivation_metrics",
    """
    INSERT INTO derivation_metric (derivation, history_name, architecture, build_time_ms, peak_ram_mb,
        cpu_time_ms, avg_cpu_pct, disk_read_bytes, disk_write_bytes, oom_killed, concurrent_builds,
        build_cores, cpu_core_score, worker_id, created_at)
    SELECT d.id, coalesce(d.pname, d.name), d.architecture, r.build_time_ms, r.peak_ram_mb, r.cpu_time_ms,
        r.avg_cpu_pct, r.disk_read_bytes, r.disk_write_bytes, r.oom_killed, r.concurrent_builds,
        r.build_cores, r.cpu_core_score, r.worker_id, %(now)s
    FROM jsonb_to_recordset(%(metrics)s::jsonb) AS r (derivation bigint, worker_id uuid,
        build_time_ms integer, peak_ram_mb integer, cpu_time_ms integer, avg_cpu_pct real,
        disk_read_bytes bigint, disk_write_bytes bigint, oom_killed boolean, concurrent_builds integer,
        build_cores integer, cpu_core_score integer)
    JOIN derivation d ON d.id = r.derivation
    """,
)


@attrs.frozen
class StoreBuildOutput(Joint[None]):
    """What was built (writer message): sizes, products, metrics, the `substituted` flag."""

    assignment: int
    outputs: tuple[BuiltOutput, ...]
    substituted: bool
    metrics: BuildMetrics | None = None

    stage: ClassVar[Stage] = Stage.OUTPUT

    @property
    def subject(self) -> Hashable:
        """The assignment."""
        return self.assignment

    @classmethod
    async def apply_together(cls, tx: Transaction, messages: Sequence[Self]) -> list[None]:
        """Store it; dropped where the assignment is closed."""
        sizes = [(m.assignment, output.name, output.nar_size) for m in messages for output in m.outputs]
        rows = await tx.rows(
            STORE_OUTPUTS,
            assignments=[message.assignment for message in messages],
            substituted=[message.substituted for message in messages],
            owners=[assignment for assignment, _, _ in sizes],
            names=[name for _, name, _ in sizes],
            sizes=[size for _, _, size in sizes],
        )
        by_assignment = {message.assignment: message for message in messages}
        found = [(by_assignment[assignment], derivation, worker) for assignment, derivation, worker in rows]
        await _store_products(tx, {derivation: message.outputs for message, derivation, _ in found})
        await store_metrics(
            tx, [(d, worker, m.metrics) for m, d, worker in found if m.metrics and not m.substituted]
        )
        return [None] * len(messages)


async def _store_products(tx: Transaction, outputs: Mapping[int, Sequence[BuiltOutput]]) -> None:
    """The products of builds, by derivation, in place of earlier ones."""
    rows = [
        (derivation, output.name, product)
        for derivation, built in outputs.items()
        for output in built
        for product in output.products
    ]
    if not rows:
        return
    await tx.run(DROP_PRODUCTS, derivations=ordered(derivation for derivation, _, _ in rows))
    products = [product for _, _, product in rows]
    await tx.run(
        INSERT_PRODUCTS,
        derivations=[derivation for derivation, _, _ in rows],
        outputs=[name for _, name, _ in rows],
        types=[product.file_type for product in products],
        subtypes=[product.subtype for product in products],
        names=[product.name for product in products],
        paths=[product.path for product in products],
        sizes=[product.size for product in products],
    )


async def store_metrics(tx: Transaction, measured: Sequence[tuple[int, UUID, BuildMetrics]]) -> None:
    """What builds took, by derivation and worker."""
    rows = [
        {"derivation": derivation, "worker_id": str(worker), **attrs.asdict(metrics)}
        for derivation, worker, metrics in measured
    ]
    if rows:
        await tx.run(INSERT_METRICS, metrics=json.dumps(rows), now=tx.now)
