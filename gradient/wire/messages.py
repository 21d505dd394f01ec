"""Every message of the protocol, one frozen attrs class each, with its tag. Pure.

A frame is the MessagePack array `[tag, message]`, the message a map keyed by field name. Tags are
append-only. A field added later must have a default: then no new protocol version is needed.

The seed's `JobUpdate` kinds are messages of their own here (`Fetching`, `EvalResult`, `Building`, ...);
each report echoes `job_id` and `assignment_id`, and the server drops one whose assignment is stale.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import attrs

from gradient.model import (
    BuildMetrics,
    BuildSpec,
    BuildStage,
    BuiltOutput,
    CachedSource,
    DiscoveredDerivation,
    EntryPoint,
    FailureKind,
    FlakeJob,
    JobKind,
    MessageLevel,
    Span,
)

PROTOCOL_OLDEST: Final = 1
PROTOCOL_NEWEST: Final = 1

# --- handshake ------------------------------------------------------------------------------------


@attrs.frozen
class Capabilities:
    """What a worker is willing to do; the ack holds what the server lets it do."""

    fetch: bool = True
    eval: bool = True
    build: bool = True


@attrs.frozen
class InitConnection:
    """First frame of a worker. `worker_id` is a UUID the worker keeps in its data directory, `name` what
    people call it."""

    oldest: int
    newest: int
    worker_id: str
    capabilities: Capabilities
    name: str = ""


@attrs.frozen
class AuthChallenge:
    """The projects (peers) this worker may prove itself to, and the agreed protocol version."""

    version: int
    peers: tuple[str, ...]


@attrs.frozen
class PeerToken:
    """A worker token for one peer; peer `*` is the answer for every peer without a line of its own."""

    peer: str
    token: str = attrs.field(repr=False)


@attrs.frozen
class AuthResponse:
    """The worker's tokens."""

    tokens: tuple[PeerToken, ...]


@attrs.frozen
class FailedPeer:
    """A peer whose token was refused, and why."""

    peer: str
    reason: str


@attrs.frozen
class InitAck:
    """The session stands: one valid peer is enough."""

    capabilities: Capabilities
    authorized_peers: tuple[str, ...]
    failed_peers: tuple[FailedPeer, ...] = ()


@attrs.frozen
class Reject:
    """The session is refused (codes: docs/protocol.md); the sender closes after it."""

    code: int
    reason: str


@attrs.frozen
class Draining:
    """The sender stops: a server assigns nothing more, a worker takes nothing more."""


# --- worker and jobs ------------------------------------------------------------------------------


@attrs.frozen
class WorkerCapabilities:
    """What this worker can hold; sent after the ack and again on a change."""

    architectures: tuple[str, ...]
    system_features: tuple[str, ...]
    max_concurrent_builds: int
    max_concurrent_evals: int
    cpu_count: int
    ram_total_mb: int
    cpu_core_score: int | None = None
    zone: str | None = None
    endpoint: str | None = None
    nix_version: str | None = None


@attrs.frozen
class WorkerMetrics:
    """Heartbeat, every 10 s."""

    cpu_usage_pct: float | None = None
    ram_free_mb: int | None = None
    disk_mbps: float | None = None
    upload_mbps: float | None = None
    download_mbps: float | None = None


@attrs.frozen
class RequestJobList:
    """Send every candidate visible to me."""


@attrs.frozen
class RequiredPath:
    """An input a candidate needs, with its sizes when the cache has it."""

    path: str
    nar_size: int | None = None
    file_size: int | None = None


@attrs.frozen
class Candidate:
    """A job this worker could take; it answers with a CandidateScore. Paths are full store paths."""

    job_id: str
    required_paths: tuple[RequiredPath, ...] = ()
    output_paths: tuple[str, ...] = ()
    architecture: str | None = None
    required_features: tuple[str, ...] = ()


@attrs.frozen
class JobListChunk:
    """A page of the full candidate list."""

    candidates: tuple[Candidate, ...]
    is_final: bool


@attrs.frozen
class JobOffer:
    """Candidates that are new to this worker since the last offer."""

    candidates: tuple[Candidate, ...]


@attrs.frozen
class CandidateScore:
    """What a candidate would cost here: required paths missing from the local store, in count and bytes."""

    job_id: str
    missing_count: int
    missing_nar_size: int
    outputs_present: bool


@attrs.frozen
class RequestJobChunk:
    """Scores of offered candidates; sent even when empty, and always before the RequestJob they serve."""

    scores: tuple[CandidateScore, ...]
    is_final: bool


@attrs.frozen
class RequestJob:
    """A slot of this kind is free."""

    kind: JobKind


@attrs.frozen
class AssignJob:
    """Run this job; exactly one of `flake` and `build` is set. Re-sent for a running job it renews the
    assignment: later reports echo the new `assignment_id`."""

    job_id: str
    assignment_id: int
    flake: FlakeJob | None = None
    build: BuildSpec | None = None


@attrs.frozen
class AssignJobResponse:
    """Taken, or handed back with a reason."""

    job_id: str
    assignment_id: int
    accepted: bool
    reason: str | None = None


@attrs.frozen
class AbortJob:
    """Stop this job at once and answer JobFailed with kind Aborted."""

    job_id: str
    reason: str


# --- reports (the seed's JobUpdate kinds, JobCompleted, JobFailed) --------------------------------


@attrs.frozen
class Report:
    """What every report carries."""

    job_id: str
    assignment_id: int


@attrs.frozen
class Fetching(Report):
    """The flake job fetches."""


@attrs.frozen
class FetchResult(Report):
    """The fetched source; the evaluation stores it."""

    flake_source: CachedSource | None


@attrs.frozen
class EvaluatingFlake(Report):
    """Status only."""


@attrs.frozen
class EvaluatingDerivations(Report):
    """Attribute discovery and the closure walk begin."""


@attrs.frozen
class EvalResult(Report):
    """A batch of walked derivations, recorded at once; what they upload is in the cache already.

    `entry_points` name derivations of this or an earlier batch, or ones the graph knows completely.
    An entry of `errors` becomes an error message and fails the evaluation at its end.
    """

    derivations: tuple[DiscoveredDerivation, ...] = ()
    entry_points: tuple[EntryPoint, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@attrs.frozen
class EvalMessage(Report):
    """A message of the evaluation, such as a failing attribute (source `nix-eval:<attr>`)."""

    level: MessageLevel
    source: str
    message: str


@attrs.frozen
class EvalStats(Report):
    """Evaluation metrics; fields are None where the evaluator cannot tell."""

    attributes: int
    derivations: int
    failed_attributes: int
    fetch_ms: int | None = None
    eval_ms: int | None = None
    walk_ms: int | None = None
    peak_rss_mb: int | None = None


@attrs.frozen
class EvalProgress(Report):
    """Live counts of a flake job, at most one a second."""

    attributes_done: int
    attributes_total: int | None
    derivations: int


@attrs.frozen
class Building(Report):
    """The build begins: sent before anything that can fail."""

    build_id: int


@attrs.frozen
class Stage(Report):
    """Live stage of a build job."""

    stage: BuildStage


@attrs.frozen
class BuildOutput(Report):
    """What was built. `substituted`: the outputs were in the local store already, or came from a cache."""

    build_id: int
    outputs: tuple[BuiltOutput, ...]
    substituted: bool
    metrics: BuildMetrics | None = None


@attrs.frozen
class JobCompleted(Report):
    """Sent after every upload of the job is committed; it stays behind the job's own logs."""

    spans: tuple[Span, ...] = ()
    elapsed_ms: int = 0


@attrs.frozen
class JobFailed(Report):
    """The job ended otherwise. `missing_paths` belong to InputsUnavailable."""

    error: str
    kind: FailureKind
    missing_paths: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    elapsed_ms: int = 0
    metrics: BuildMetrics | None = None


@attrs.frozen
class LogChunk(Report):
    """A piece of the live build log, in order, raw bytes of the builder."""

    data: bytes


# --- queries, answered beside the reader ----------------------------------------------------------


class QueryMode(IntEnum):
    """Normal: which are held. Pull: held ones with metadata and a URL. Push: a flag for each, and a grant."""

    NORMAL = 0
    PULL = 1
    PUSH = 2


@attrs.frozen
class CacheQuery:
    """Ask the cache about at most 1,000 paths on behalf of a job."""

    job_id: str
    query_id: int
    paths: tuple[str, ...]
    mode: QueryMode


@attrs.frozen
class CachedPathInfo:
    """One path of a CacheStatus. With mode Pull a held path carries everything needed to import it."""

    path: str
    cached: bool
    url: str | None = None
    nar_hash: str | None = None
    nar_size: int | None = None
    file_hash: str | None = None
    file_size: int | None = None
    references: tuple[str, ...] = ()
    deriver: str | None = None
    ca: str | None = None
    signatures: tuple[str, ...] = ()


@attrs.frozen
class UploadGrant:
    """Where and with which short-lived token the worker may upload; `expires` in epoch seconds."""

    url: str
    token: str = attrs.field(repr=False)
    expires: int = 0


@attrs.frozen
class CacheStatus:
    """Answer to a CacheQuery; `upload` belongs to mode Push."""

    query_id: int
    cached: tuple[CachedPathInfo, ...]
    upload: UploadGrant | None = None


@attrs.frozen
class CacheError:
    """The state is unknown: ask again, and never read it as "missing"."""

    query_id: int
    message: str


@attrs.frozen
class QueryKnownDerivations:
    """Which of these have their complete closure in the graph?"""

    job_id: str
    query_id: int
    drv_paths: tuple[str, ...]


@attrs.frozen
class KnownDerivations:
    """The known ones; the worker skips their subtrees."""

    query_id: int
    known: tuple[str, ...]


@attrs.frozen
class ImportRequest:
    """Import from derivation: build these for the running evaluation, then answer."""

    job_id: str
    assignment_id: int
    request_id: int
    drv_paths: tuple[str, ...]


@attrs.frozen
class ImportResult:
    """Answer to an ImportRequest: `failed_drv` None means every one is in the cache now."""

    job_id: str
    request_id: int
    failed_drv: str | None = None
    reason: str | None = None


# Tags are append-only; a retired number is never given again.
TAGS: Final[dict[int, type]] = {
    1: InitConnection,
    2: AuthChallenge,
    3: AuthResponse,
    4: InitAck,
    5: Reject,
    6: Draining,
    10: WorkerCapabilities,
    11: WorkerMetrics,
    12: RequestJobList,
    13: JobListChunk,
    14: JobOffer,
    15: RequestJobChunk,
    16: RequestJob,
    17: AssignJob,
    18: AssignJobResponse,
    19: AbortJob,
    30: Fetching,
    31: FetchResult,
    32: EvaluatingFlake,
    33: EvaluatingDerivations,
    34: EvalResult,
    35: EvalMessage,
    36: EvalStats,
    37: EvalProgress,
    38: Building,
    39: Stage,
    40: BuildOutput,
    41: JobCompleted,
    42: JobFailed,
    43: LogChunk,
    60: CacheQuery,
    61: CacheStatus,
    62: CacheError,
    63: QueryKnownDerivations,
    64: KnownDerivations,
    65: ImportRequest,
    66: ImportResult,
}
TAG_OF: Final[dict[type, int]] = {cls: tag for tag, cls in TAGS.items()}

# What each end may send; anything else from it is a protocol error.
FROM_WORKER: Final = frozenset(
    {
        InitConnection, AuthResponse, Reject, Draining, WorkerCapabilities, WorkerMetrics, RequestJobList,
        RequestJobChunk, RequestJob, AssignJobResponse, Fetching, FetchResult, EvaluatingFlake,
        EvaluatingDerivations, EvalResult, EvalMessage, EvalStats, EvalProgress, Building, Stage, BuildOutput,
        JobCompleted, JobFailed, LogChunk, CacheQuery, QueryKnownDerivations, ImportRequest,
    }
)  # fmt: skip
FROM_SERVER: Final = frozenset(
    {
        AuthChallenge, InitAck, Reject, Draining, JobListChunk, JobOffer, AssignJob, AbortJob, CacheStatus,
        CacheError, KnownDerivations, ImportResult,
    }
)  # fmt: skip
