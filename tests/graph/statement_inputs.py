"""Values for the parameters of every statement, by name: what each would be given on the graph of
`big_graph`.

A statement that is new is covered as soon as its parameters have names that stand here. One name that means
two things gets its other value under the statement's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import md5
from typing import Any, Final

from gradient.graph.pg import Connection, fetch_all
from gradient.graph.statements import Statement
from gradient.model import BuildStatus, EvaluationStatus, FailureKind, JobKind
from tests.graph.big_graph import BUILT, REVISION

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
# Lengths of every array, which statements unnest side by side: what ends at once, and a batch of derivations.
FEW: Final = 20
BATCH: Final = 600
# The first pending derivations of the revision at work, its running evaluation, and an attempt that is done.
PENDING: Final = BUILT + 1
EVALUATION: Final = 1
ATTEMPT: Final = BUILT - 500
# Evaluations of that revision that name a few derivations each: live ones, and ended ones.
LIVE: Final = [3, 4, 5, 6]
ENDED: Final = list(range(7, 23))

_CLOSURE = list(range(PENDING, REVISION + 1, 3))
_WORKER = "00000000-0000-0000-0000-000000000001"


def _ids(many: int) -> list[int]:
    return list(range(PENDING, PENDING + 4 * many, 4))


def fixed(many: int) -> dict[str, Any]:
    """Parameters whose value is the same wherever the graph came from."""
    ids = _ids(many)
    return {
        # Sets of derivations.
        "ids": ids,
        "roots": ids,
        "flipped": ids,
        "frontier": ids,
        "failed": ids,
        "lost": ids,
        "became": ids[:5],
        "fresh": ids[:5],
        "recorded": ids[:5],
        "closure": _CLOSURE,
        "area": _CLOSURE,
        "derivations": ids,
        "dependencies": [i - 7 for i in ids],
        "marks": [True] * many,
        "timeouts": [60] * many,
        "silents": [60] * many,
        "sizes": [1000] * many,
        "evaluations": [EVALUATION] * many,
        "assignments": ids,
        # One of each.
        "derivation": PENDING,
        "build": PENDING,
        "evaluation": EVALUATION,
        "attempt": ATTEMPT,
        "worker": _WORKER,
        "worker_name": "w",
        "cache": 1,
        "project": 1,
        "task": None,
        "direction": 1,
        # Batches; each statement takes its columns.
        "batch": json.dumps(
            [
                {
                    "id": i,
                    "architecture": "x86_64-linux",
                    "required_features": [],
                    "prefer_local_build": False,
                    "is_fixed_output": False,
                    "allow_substitutes": True,
                    "ifd": False,
                    "unwalked_inputs": 1,
                    "hash": f"{i:032}",
                    "name": "new",
                }
                for i in ids
            ]
        ),
        "nars": json.dumps(
            [
                {
                    "hash": f"{i:032}",
                    "package": "new",
                    "nar_hash": "sha256:0",
                    "nar_size": 1,
                    "file_hash": "sha256:1",
                    "file_size": 1,
                    "references": [],
                }
                for i in ids
            ]
        ),
        "caches": [1] * many,
        "times": [1] * many,
        "signatures": ["key:c2ln"] * many,
        "metrics": json.dumps(
            [{"derivation": i, "worker_id": _WORKER, "build_time_ms": 1, "oom_killed": False} for i in ids]
        ),
        # Reports of builds, and claims.
        "outcomes": [1] * many,
        "timelines": ["[]"] * many,
        "owners": ids,
        "workers": [_WORKER] * many,
        "scores": [1.0] * many,
        "types": ["doc"] * many,
        "subtypes": ["html"] * many,
        "paths": ["/nix/store/x"] * many,
        "packages": ["package"] * many,
        "sources": [md5(f"source{i}".encode(), usedforsecurity=False).hexdigest() for i in ids],
        "outputs": ["out"] * many,
        "attrs": [f"packages.x86_64-linux.new{i}" for i in ids],
        "messages": [f"message {i}" for i in ids],
        "attempts": list(range(1, many + 1)),
        "due": [NOW - timedelta(seconds=60 * i) for i in range(many)],
        "last": many,
        # Status, flags and limits.
        "status": int(BuildStatus.COMPLETED),
        "statuses": [int(EvaluationStatus.QUEUED)],
        "allowed": [int(EvaluationStatus.BUILDING), int(EvaluationStatus.WAITING)],
        "outcome": 1,
        "kind": int(JobKind.EVAL),
        "level": 1,
        "walk_mode": 0,
        "limit": 50,
        "size": 50,
        "keep": 10,
        "after": 0,
        "before": 100,
        "number": 9999,
        "key": 12345,
        "score": 1.0,
        "cache_available": False,
        "served": [True, False] * (many // 2),
        "substituted": False,
        "fetch_only": False,
        "goes_on": True,
        "repeat": False,
        "or_running": True,
        "oom_killed": False,
        "distrusted": True,
        "unstick": True,
        # Texts.
        "name": "package",
        "job": f"eval:{EVALUATION}",
        "jobs": [f"build:{i}" for i in ids],
        "reason": json.dumps({"kind": "workers"}),
        "source": "{}",
        "message": "it broke",
        "error": "it broke",
        "timeline": "[]",
        "repository": "git+https://example.org/x",
        "commit": "c",
        "flake_source": None,
        "wildcards": ["packages.*.*"],
        "started_by": "somebody",
        "comment": "why",
        "rev": "r",
        "data": b"a line of a log",
        "index": 1000,
        "checksum": "c",
        "now": NOW,
        "applied_at": NOW,
        "token": _WORKER,
        **dict.fromkeys(
            (
                "stuck_since",
                "seen_at",
                "fresh_since",
                "unused_since",
                "promised_since",
                "wedged_before",
                "sent_before",
            ),
            NOW,
        ),
        "created_before": NOW + timedelta(days=3650),
        **dict.fromkeys(
            (
                "attributes",
                "failed_attributes",
                "fetch_ms",
                "eval_ms",
                "walk_ms",
                "peak_rss_mb",
                "build_time_ms",
                "peak_ram_mb",
                "cpu_time_ms",
                "avg_cpu_pct",
                "disk_read_bytes",
                "disk_write_bytes",
                "concurrent_builds",
                "build_cores",
                "cpu_core_score",
            ),
            1,
        ),
    }


# Where a name means something else: by statement and parameter. A list of one is that for each of the many.
OTHERWISE: Final[Mapping[str, Mapping[str, Any]]] = {
    # Whatever is above them has counted: there all of it is recorded already.
    "spread_recorded": {"fresh": list(range(PENDING, REVISION + 1))},
    # Ids of evaluations.
    "eval_counters": {"ids": LIVE},
    "open_names": {"ids": LIVE},
    "recount_evaluations": {"ids": LIVE, "ending": ENDED[0]},
    "delete_evaluations": {"ids": ENDED},
    "entry_points_of_evaluations": {"ids": ENDED},
    "lock_ended_evaluations": {"ids": ENDED},
    "unlink_evaluations": {"ids": ENDED},
    # Nothing of it moves.
    "lost_record": {"evaluation": ENDED[0]},
    "claim_builds": {"cache_available": [False]},
    "complete_builds": {"statuses": [int(BuildStatus.COMPLETED)]},
    "store_build_outputs": {"substituted": [False]},
    "close_attempt": {"reason": int(FailureKind.PERMANENT)},
    "first_ids": {"project": "main", "cache": "main"},
    "insert_evaluation": {"project": "main"},
    "ensure_api_token": {"hash": b"token"},
    "ensure_worker_registration": {"hash": b"token"},
    "find_api_token": {"hash": b"token"},
    "set_evaluation_stats": {"derivations": 1},
    "set_evaluation_status": {"status": int(EvaluationStatus.COMPLETED)},
}
# What the graph knows by name: read from it.
_KNOWN: Final = """
    SELECT array_agg(d.hash ORDER BY d.id), array_agg(d.name ORDER BY d.id), min(d.hash)
    FROM derivation d WHERE d.id = ANY(%(ids)s)
"""
_OPEN: Final = "SELECT min(id) FROM dispatched_job WHERE finished_at IS NULL"
_STORED: Final = f"SELECT file_hash FROM cached_path WHERE hash = md5('out' || {ATTEMPT})"


# The parameters that come from there.
READ: Final = ("hashes", "names", "hash", "assignment", "file_hash", "file_hashes")


class NoValue(LookupError):
    """A parameter that nobody has given a value here."""


async def read_inputs(connection: Connection, many: int) -> Mapping[str, Any]:
    """The values, those that the graph has to say included; sets have so many elements."""
    ((hashes, names, hash_part),) = await fetch_all(connection, _KNOWN, {"ids": _ids(many)})
    ((assignment,),) = await fetch_all(connection, _OPEN)
    ((file_hash,),) = await fetch_all(connection, _STORED)
    file_hashes = [f"sha256:{known}" for known in hashes]
    read = (hashes, names, hash_part, assignment, file_hash, file_hashes)
    return {**fixed(many), **dict(zip(READ, read, strict=True))}


def inputs_of(statement: Statement, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one statement. Raises NoValue."""
    own = OTHERWISE.get(statement.name, {})
    missing = [name for name in statement.parameters if name not in own and name not in inputs]
    if missing:
        raise NoValue(f"{statement.name}: give {', '.join(missing)} a value in statement_inputs.py")
    return {
        name: _for_each(own[name], inputs["ids"]) if name in own else inputs[name]
        for name in statement.parameters
    }


def _for_each(value: Any, many: Sequence[int]) -> Any:
    return value * len(many) if isinstance(value, list) and len(value) == 1 else value
