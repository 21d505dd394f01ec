"""The shared vocabulary: statuses, job kinds, derivation facts, build specs, failure kinds.

Layer: rank 0, no IO. The database, both ends of the wire, the scheduler and the web pages all speak
in these values. Integers are pinned: they stand in tables and in SQL function bodies, so a number is
never reused and a member never renumbered (a unit test holds them).

Sources: the seed pages "Jobs" and "Queueing and Counters"; store paths are full (`/nix/store/...`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import attrs

# --- evaluations ----------------------------------------------------------------------------------


class EvaluationStatus(IntEnum):
    """Where an evaluation stands (seed "Waiting and Recovery")."""

    QUEUED = 0
    EVALUATING_FLAKE = 1
    EVALUATING_DERIVATION = 2
    BUILDING = 3
    WAITING = 4
    COMPLETED = 5
    FAILED = 6
    ABORTED = 7
    FETCHING = 8

    @property
    def label(self) -> str:
        """The name people and the API read: `EvaluatingFlake`, `Completed`."""
        return _camel(self.name)


EVALUATION_TERMINAL: Final = frozenset(
    {EvaluationStatus.COMPLETED, EvaluationStatus.FAILED, EvaluationStatus.ABORTED}
)
EVALUATION_ACTIVE: Final = frozenset(EvaluationStatus) - EVALUATION_TERMINAL
# Fetching is not here: a fetch-only job that completes starts a follow-up instead of turning Building.
EVALUATION_EVALUATING: Final = frozenset(
    {EvaluationStatus.EVALUATING_FLAKE, EvaluationStatus.EVALUATING_DERIVATION}
)
# The phases whose eval job is on a worker, and in which EvalResult batches are recorded.
EVALUATION_RUNNING: Final = EVALUATION_EVALUATING | {EvaluationStatus.FETCHING}
# Where one stands whose walk is over: it waits for its builds, or for somebody to build them.
EVALUATION_AFTER_WALK: Final = frozenset({EvaluationStatus.BUILDING, EvaluationStatus.WAITING})


class EvaluationKind(IntEnum):
    """Why an evaluation exists."""

    NORMAL = 0
    INPUT_UPDATE = 1
    DRV_RECOVERY = 2
    SSH = 3


class EvalCacheStatus(IntEnum):
    """What became of the shared evaluation cache of an evaluation."""

    NONE = 0
    MISS = 1
    HIT = 2


class WalkMode(IntEnum):
    """Whether the closure walk may stop at derivations the graph already knows completely."""

    PRUNED = 0
    FULL = 1


class ConcurrencyPolicy(IntEnum):
    """What a new evaluation of a task does to the running one."""

    HARD_ABORT = 0
    SOFT_ABORT = 1
    ALL = 2
    SKIP = 3


class TriggerType(IntEnum):
    """What started an evaluation."""

    POLLING = 0
    PUSH = 1
    PULL_REQUEST = 2
    TIME = 3


# --- shared builds --------------------------------------------------------------------------------


class BuildStatus(IntEnum):
    """Where a shared build (`derivation_build`) stands (seed "Queueing and Counters")."""

    CREATED = 0
    QUEUED = 1
    BUILDING = 2
    COMPLETED = 3
    FAILED_PERMANENT = 4
    ABORTED = 5
    DEPENDENCY_FAILED = 6
    SUBSTITUTED = 7
    FAILED_TRANSIENT = 8
    FAILED_TIMEOUT = 9
    SKIPPED = 10

    @property
    def label(self) -> str:
        """The name people and the API read. Created shows as Queued: both mean "not started"."""
        return "Queued" if self is BuildStatus.CREATED else _camel(self.name)


TERMINAL_SUCCESS: Final = frozenset({BuildStatus.COMPLETED, BuildStatus.SUBSTITUTED})
TERMINAL_FAILURE: Final = frozenset(
    {BuildStatus.FAILED_PERMANENT, BuildStatus.DEPENDENCY_FAILED, BuildStatus.FAILED_TIMEOUT}
)
REQUEUEABLE: Final = TERMINAL_FAILURE | {BuildStatus.ABORTED}
BUILDER_STATUSES: Final = frozenset(
    {BuildStatus.CREATED, BuildStatus.QUEUED, BuildStatus.BUILDING, BuildStatus.FAILED_TRANSIENT}
)
# Aborted is not here: no evaluation can wait for an aborted shared build.
NEED_BUILD_STATUSES: Final = BUILDER_STATUSES | {BuildStatus.SKIPPED}
PENDING: Final = frozenset({BuildStatus.CREATED, BuildStatus.QUEUED})
ABORTABLE: Final = PENDING | {BuildStatus.BUILDING}
CASCADE_TARGET: Final = PENDING | {BuildStatus.FAILED_TRANSIENT}
# A DependencyFailed build is retried by retrying the failed dependencies below it.
USER_RETRYABLE: Final = REQUEUEABLE


class EdgeKind(IntEnum):
    """How one derivation depends on another: as a build input, through a runtime reference, or both."""

    BUILD = 0
    RUNTIME = 1
    BOTH = 2


class AttemptOutcome(IntEnum):
    """How one attempt at a shared build ended."""

    RUNNING = 0
    BUILT = 1
    SUBSTITUTED = 2
    FAILED = 3
    ABORTED = 4


class AttemptReason(IntEnum):
    """Why an attempt ended other than by success."""

    SUBSTITUTE_UNAVAILABLE = 0
    OOM = 1
    DISK_FULL = 2
    NETWORK = 3
    BUILDER_CRASH = 4
    BUILDER_NONZERO = 5
    WALL_CLOCK_TIMEOUT = 6
    SILENT_TIMEOUT = 7
    INPUTS_UNAVAILABLE = 8
    WORKER_LOST = 9
    NOT_ENOUGH_RESOURCES = 10


# --- jobs -----------------------------------------------------------------------------------------


class ClusterStatus(IntEnum):
    """Where a cluster of jobs stands."""

    QUEUED = 0
    RUNNING = 1
    COMPLETED = 2
    FAILED = 3
    ABORTED = 4


class ClusterOutcome(IntEnum):
    """How one attempt at running a cluster ended."""

    SUCCEEDED = 0
    FAILED = 1
    PREPARE_FAILED = 2
    ABORTED = 3


class JobKind(IntEnum):
    """The two kinds of job, as `dispatched_job.kind` holds them."""

    EVAL = 0
    BUILD = 1


class DispatchOutcome(IntEnum):
    """How an assignment closed. An open `dispatched_job` row has no outcome."""

    COMPLETED = 0
    FAILED = 1
    ABANDONED = 2


class FlakeStep(IntEnum):
    """One step of a flake job (seed "Jobs", Flake Jobs)."""

    FETCH_FLAKE = 0
    EVALUATE_FLAKE = 1
    EVALUATE_DERIVATIONS = 2


class BuildKind(IntEnum):
    """What a build job does (seed "Jobs", Build Jobs)."""

    BUILD = 0
    SUBSTITUTE = 1
    DOWNLOAD = 2


class FailureKind(IntEnum):
    """How a job failed, in the worker's words; the server decides what follows (seed "Jobs", Failures)."""

    TRANSIENT = 0
    PERMANENT = 1
    TIMEOUT = 2
    SUBSTITUTE_UNAVAILABLE = 3
    INPUTS_UNAVAILABLE = 4
    CORRUPT_EVAL_CACHE = 5
    ABORTED = 6
    CANCELED = 7


class BuildStage(IntEnum):
    """Live stage of a build job in the worker pool."""

    PREFETCH = 0
    BUILD = 1
    UPLOAD = 2


# Build jobs that one slot may have open: three that upload behind one that builds.
JOBS_PER_SLOT: Final = 4


def free_build_slots(limit: int, building: int, uploading: int) -> int:
    """How many more builds a worker with `limit` slots can take; worker and server count alike (ADR 17).

    A build that has come to its upload has left its slot to the next one: cores that wait for a network
    build nothing. But uploads do not pile up behind a slow line: then the next build waits.
    """
    return min(limit, JOBS_PER_SLOT * limit - uploading) - building


class MessageLevel(IntEnum):
    """Level of an evaluation message. An Error fails the evaluation at its end."""

    ERROR = 0
    WARNING = 1
    NOTICE = 2


# --- values ---------------------------------------------------------------------------------------

# A B-tree row of PostgreSQL holds 2,704 bytes, and an attribute path stands in one with its evaluation's id.
MAX_ATTR: Final = 2000  # bytes


@attrs.frozen
class OutputPath:
    """One output of a derivation: `name` (`out`) and full store path, "" while unknown (floating)."""

    name: str
    path: str


@attrs.frozen
class Repository:
    """A flake that the worker fetches. `url` is the flake reference without its fragment, query included
    (`git+https://host/repo?ref=main&dir=sub`); `commit` pins it when known."""

    url: str
    commit: str | None = None


@attrs.frozen
class CachedSource:
    """A flake source that is a store path: fetched before, or uploaded by `gradient build`.

    The attributes beside the path are those that flake evaluation sees (`self.rev`, ...); without
    them a flake that reads them gets other `.drv` paths. `nar_hash` is SRI; `last_modified` is in
    seconds since the epoch; `dir` is the folder of `flake.nix` below the source, "" for its top.
    """

    store_path: str
    nar_hash: str | None = None
    rev: str | None = None
    last_modified: int | None = None
    rev_count: int | None = None
    dir: str = ""


@attrs.frozen
class InputOverride:
    """A flake input override of the task. `url` None keeps the URL and only forces an update."""

    input_name: str
    url: str | None = None


@attrs.frozen
class FlakeJob:
    """A flake job. Exactly one of `repository` and `cached` is set.

    `wildcards` empty means `packages.<system>.*` and `checks.<system>.*` of the worker's systems.
    """

    steps: tuple[FlakeStep, ...]
    repository: Repository | None = None
    cached: CachedSource | None = None
    wildcards: tuple[str, ...] = ()
    timeout_secs: int | None = None
    input_overrides: tuple[InputOverride, ...] = ()
    full_walk: bool = False


@attrs.frozen
class BuildSpec:
    """What a build job has to make. `build_id` is the shared build's id."""

    build_id: int
    drv_path: str
    kind: BuildKind
    outputs: tuple[OutputPath, ...]
    is_fixed_output: bool
    timeout_secs: int
    max_silent_secs: int
    architecture: str
    required_features: tuple[str, ...] = ()


@attrs.frozen
class DiscoveredDerivation:
    """One walked derivation of an EvalResult batch: its own record, complete.

    `dependencies` are its direct input derivations (full `.drv` paths), `input_sources` its direct
    input store paths that no derivation makes.
    """

    drv_path: str
    outputs: tuple[OutputPath, ...]
    dependencies: tuple[str, ...]
    input_sources: tuple[str, ...]
    architecture: str
    required_features: tuple[str, ...] = ()
    timeout_secs: int | None = None
    max_silent_secs: int | None = None
    prefer_local_build: bool = False
    is_fixed_output: bool = False
    allow_substitutes: bool = True
    pname: str | None = None
    ifd: bool = False


@attrs.frozen
class EntryPoint:
    """An attribute of the flake and the derivation it evaluates to."""

    attr: str
    drv_path: str


@attrs.frozen
class BuildProduct:
    """A line of `nix-support/hydra-build-products`. `size` in bytes, None for a folder."""

    file_type: str
    subtype: str
    name: str
    path: str
    size: int | None = None


@attrs.frozen
class BuiltOutput:
    """An output as it was built. `nar_hash` is `sha256:<nix32>`; sizes in bytes."""

    name: str
    path: str
    nar_size: int | None = None
    nar_hash: str | None = None
    products: tuple[BuildProduct, ...] = ()


@attrs.frozen
class BuildMetrics:
    """What one build cost. Fields are None where the machine could not measure them."""

    build_time_ms: int
    peak_ram_mb: int | None = None
    cpu_time_ms: int | None = None
    avg_cpu_pct: float | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    oom_killed: bool = False
    concurrent_builds: int | None = None
    build_cores: int | None = None
    cpu_core_score: int | None = None


@attrs.frozen
class Span:
    """One row of a job's phase timeline: milliseconds since the job began."""

    phase: str
    start_ms: int
    end_ms: int
    parent: int | None = None
    paths: int = 0
    bytes: int = 0


@attrs.frozen
class NarRecord:
    """A NAR in the cache: what narinfo says of it. Hashes are `sha256:<nix32>`, sizes in bytes.

    `references` and `deriver` are base names, `references` in the order the worker gave them.
    """

    store_path: str
    nar_hash: str
    nar_size: int
    file_hash: str
    file_size: int
    references: tuple[str, ...] = ()
    deriver: str | None = None
    ca: str | None = None


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
