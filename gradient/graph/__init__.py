"""The build graph in PostgreSQL: schema, statements, the graph writer, transitions, counters, recovery.

Layer: rank 2. The only importer of psycopg; knows neither the wire nor a Nix daemon. Every module begins
with what it is for; by what happens:

    the writer      writer.py takes messages, joint.py those that go together; transaction.py is what they
                    see, moves.py what they have moved; statements.py, predicates.py, locks.py
    a walk arrives  record.py; batch_checks.py, build_circles.py, output_twins.py (refusals);
                    derivation_records.py, walk_completeness.py; evaluation_reports.py (the other reports)
    may it start    need.py (wanted), can_start.py (Created to Queued), runtime_can_start.py,
                    completeness.py, references.py; upstream.py (other caches)
    a build         assignments.py (the claim), builds.py (starts, succeeds), build_outputs.py, nar.py,
                    build_failures.py, failure.py, dependency_failure.py, logs.py, requeue.py (back
                    to Queued), evaluation_build.py (its abort and retry)
    an evaluation   evaluations.py (from phase to phase), evaluation_end.py (verdict, abort), release.py
                    (what an abort lets go), counters.py, reachability.py, messages.py
    what was lost   retire.py, demote.py (cached paths), repair.py, heal.py, drv_recovery.py,
                    unconfirmed.py, recovery.py (at the start); consistency.py: drift.py, recounts.py
    collection      evaluation_gc.py, derivation_gc.py, path_gc.py; fetches.py and promises.py keep
    reads           candidate_reads.py, worker_reads.py, evaluation_reads.py, build_reads.py, log_reads.py,
                    failure_causes.py, cache_reads.py
    the database    pg.py, pg_driver.py, pg_errors.py, pg_pool.py, adapt.py, embedded.py, migrate.py;
                    access.py (tokens); schema/
"""
