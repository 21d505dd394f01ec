-- The build graph and what surrounds it. Names are the seeds'; status numbers are gradient/model.py's.
--
-- One key: a shared build is identified by its derivation (docs/adr/0015), so "at most one shared
-- build per derivation" holds by construction and `build:<id>` names both.

-- ---- people, caches, workers ---------------------------------------------------------------------

CREATE TABLE project (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    created_at  timestamptz NOT NULL
);

CREATE TABLE cache (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    priority    integer NOT NULL DEFAULT 10,
    active      boolean NOT NULL DEFAULT true,
    created_at  timestamptz NOT NULL
);

CREATE TABLE project_cache (
    project     bigint NOT NULL REFERENCES project ON DELETE CASCADE,
    cache       bigint NOT NULL REFERENCES cache ON DELETE CASCADE,
    PRIMARY KEY (project, cache)
);

CREATE TABLE cache_upstream (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cache       bigint NOT NULL REFERENCES cache ON DELETE CASCADE,
    url         text NOT NULL,
    public_key  text NOT NULL,
    active      boolean NOT NULL DEFAULT true,
    UNIQUE (cache, url)
);

CREATE TABLE api_token (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    -- SHA-256 of the token: 48 random bytes need no slow hash.
    token_hash  bytea NOT NULL UNIQUE,
    created_at  timestamptz NOT NULL,
    revoked_at  timestamptz
);

CREATE TABLE worker_registration (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    project      bigint NOT NULL REFERENCES project ON DELETE CASCADE,
    -- NULL: any worker that knows the token.
    worker_id    uuid,
    token_hash   bytea NOT NULL,
    active       boolean NOT NULL DEFAULT true,
    enable_fetch boolean NOT NULL DEFAULT true,
    enable_eval  boolean NOT NULL DEFAULT true,
    enable_build boolean NOT NULL DEFAULT true,
    created_at   timestamptz NOT NULL
);
CREATE INDEX worker_registration_project ON worker_registration (project);

CREATE TABLE task (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    project             bigint NOT NULL REFERENCES project ON DELETE CASCADE,
    name                text NOT NULL,
    repository          text NOT NULL,
    wildcards           text[] NOT NULL DEFAULT '{}',
    active              boolean NOT NULL DEFAULT true,
    concurrency         smallint NOT NULL DEFAULT 1,
    keep_evaluations    integer NOT NULL DEFAULT 30,
    wait_for_workers    boolean NOT NULL DEFAULT false,
    retry_failed_builds boolean NOT NULL DEFAULT false,
    force_evaluation    boolean NOT NULL DEFAULT false,
    created_at          timestamptz NOT NULL,
    UNIQUE (project, name)
);

CREATE TABLE task_trigger (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task          bigint NOT NULL REFERENCES task ON DELETE CASCADE,
    trigger_type  smallint NOT NULL,
    config        jsonb NOT NULL DEFAULT '{}',
    active        boolean NOT NULL DEFAULT true,
    last_fired_at timestamptz
);

-- ---- derivations ---------------------------------------------------------------------------------

CREATE TABLE derivation (
    id                 bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash               text NOT NULL,            -- hash part of the .drv's store path
    name               text NOT NULL,            -- without `.drv`
    architecture       text NOT NULL DEFAULT '', -- Nix's `system`; '' on a stub
    required_features  text[] NOT NULL DEFAULT '{}',
    pname              text,
    prefer_local_build boolean NOT NULL DEFAULT false,
    is_fixed_output    boolean NOT NULL DEFAULT false,
    allow_substitutes  boolean NOT NULL DEFAULT true,
    ifd                boolean NOT NULL DEFAULT false,
    -- The derivation's own record is present: outputs, every edge, input sources.
    walked             boolean NOT NULL DEFAULT false,
    -- Direct build inputs whose subtree is not recorded (seed: Walk Completeness).
    unwalked_inputs    integer NOT NULL DEFAULT 0 CHECK (unwalked_inputs >= 0),
    closure_size       bigint,
    created_at         timestamptz NOT NULL,
    UNIQUE (hash, name)
);

CREATE TABLE derivation_output (
    derivation  bigint NOT NULL REFERENCES derivation ON DELETE CASCADE,
    name        text NOT NULL,
    hash        text NOT NULL,  -- hash part of the output's store path
    package     text NOT NULL,  -- its name part
    nar_size    bigint,
    -- The NAR is in our cache. Moved only by a commit or a retirement of the cached path.
    is_cached   boolean NOT NULL DEFAULT false,
    PRIMARY KEY (derivation, name)
);
CREATE INDEX derivation_output_hash ON derivation_output (hash);

CREATE TABLE derivation_dependency (
    derivation  bigint NOT NULL REFERENCES derivation ON DELETE CASCADE,
    dependency  bigint NOT NULL REFERENCES derivation ON DELETE CASCADE,
    kind        smallint NOT NULL,  -- EdgeKind
    PRIMARY KEY (derivation, dependency),
    CHECK (derivation <> dependency)
);
CREATE INDEX derivation_dependency_reverse ON derivation_dependency (dependency, derivation) INCLUDE (kind);

CREATE TABLE derivation_input_source (
    derivation  bigint NOT NULL REFERENCES derivation ON DELETE CASCADE,
    hash        text NOT NULL,
    store_path  text NOT NULL,
    PRIMARY KEY (derivation, hash)
);

-- ---- shared builds -------------------------------------------------------------------------------

CREATE TABLE derivation_build (
    derivation           bigint PRIMARY KEY REFERENCES derivation ON DELETE CASCADE,
    status               smallint NOT NULL DEFAULT 0,
    cache_available      boolean NOT NULL DEFAULT false,  -- served by an upstream cache: a passthrough
    probed               boolean NOT NULL DEFAULT false,  -- the upstream caches have answered
    substituted          boolean NOT NULL DEFAULT false,
    -- Start-condition columns: moved by transitions, never derived by a walk per row.
    fetchable            boolean NOT NULL DEFAULT false,
    wanted               boolean NOT NULL DEFAULT false,
    blocking_deps        integer NOT NULL DEFAULT 0 CHECK (blocking_deps >= 0),
    missing_runtime_deps integer NOT NULL DEFAULT 0 CHECK (missing_runtime_deps >= 0),
    attempt              smallint NOT NULL DEFAULT 0,
    timeout_secs         integer,
    max_silent_secs      integer,
    prioritized          boolean NOT NULL DEFAULT false,
    queued_at            timestamptz,
    dispatched_at        timestamptz,
    created_at           timestamptz NOT NULL,
    updated_at           timestamptz NOT NULL
);
-- What the scheduler reads back after a restart and in its resync.
CREATE INDEX derivation_build_queued ON derivation_build (derivation) WHERE status = 1;
CREATE INDEX derivation_build_retry ON derivation_build (updated_at) WHERE status = 8;
CREATE INDEX derivation_build_building ON derivation_build (derivation) WHERE status = 2;

-- ---- evaluations ---------------------------------------------------------------------------------

CREATE TABLE evaluation (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    project         bigint NOT NULL REFERENCES project ON DELETE CASCADE,
    task            bigint REFERENCES task ON DELETE CASCADE,
    status          smallint NOT NULL DEFAULT 0,
    kind            smallint NOT NULL DEFAULT 0,
    walk_mode       smallint NOT NULL DEFAULT 0,
    cache_status    smallint NOT NULL DEFAULT 0,
    repository      text,   -- flake URL, when the worker fetches it
    commit          text,
    flake_source    jsonb,  -- CachedSource, once fetched or uploaded
    wildcards       text[] NOT NULL DEFAULT '{}',
    input_overrides jsonb NOT NULL DEFAULT '[]',
    waiting_reason  jsonb,
    waiting_since   timestamptz,
    trigger         smallint,
    started_by      text,
    source_comment  text,
    concurrent      boolean NOT NULL DEFAULT false,
    prioritized     boolean NOT NULL DEFAULT false,
    previous        bigint REFERENCES evaluation ON DELETE SET NULL,
    next            bigint REFERENCES evaluation ON DELETE SET NULL,
    graph_version   bigint NOT NULL DEFAULT 0,
    -- Counters over the shared builds this evaluation names: folded from the delta ledger.
    named_shared_builds    integer NOT NULL DEFAULT 0,
    active_shared_builds   integer NOT NULL DEFAULT 0,
    failed_shared_builds   integer NOT NULL DEFAULT 0,
    queued_shared_builds   integer NOT NULL DEFAULT 0,
    building_shared_builds integer NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL,
    updated_at          timestamptz NOT NULL,
    fetch_started_at    timestamptz,
    eval_flake_started_at timestamptz,
    eval_drv_started_at timestamptz,
    building_started_at timestamptz,
    finished_at         timestamptz
);
CREATE INDEX evaluation_active ON evaluation (id) WHERE status IN (0, 1, 2, 3, 4, 8);
CREATE INDEX evaluation_task ON evaluation (task, id DESC);
CREATE UNIQUE INDEX evaluation_one_active_per_task ON evaluation (task)
    WHERE status IN (0, 1, 2, 3, 4, 8) AND NOT concurrent;

CREATE TABLE evaluation_message (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    evaluation  bigint NOT NULL REFERENCES evaluation ON DELETE CASCADE,
    level       smallint NOT NULL,
    source      text NOT NULL,
    message     text NOT NULL,
    created_at  timestamptz NOT NULL
);
CREATE INDEX evaluation_message_evaluation ON evaluation_message (evaluation, id);

-- Signed counter moves, appended by triggers for live evaluations and folded under advisory lock 640.
-- No foreign key: a trigger must take no lock on the evaluation.
CREATE TABLE evaluation_shared_build_delta (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    evaluation  bigint NOT NULL,
    named       integer NOT NULL,
    active      integer NOT NULL,
    failed      integer NOT NULL,
    queued      integer NOT NULL,
    building    integer NOT NULL
);
CREATE INDEX evaluation_shared_build_delta_evaluation ON evaluation_shared_build_delta (evaluation);

CREATE TABLE build_job (
    evaluation  bigint NOT NULL REFERENCES evaluation ON DELETE CASCADE,
    derivation  bigint NOT NULL REFERENCES derivation_build ON DELETE CASCADE,
    aborted     boolean NOT NULL DEFAULT false,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (evaluation, derivation)
);
CREATE INDEX build_job_derivation ON build_job (derivation, evaluation);

CREATE TABLE entry_point (
    evaluation  bigint NOT NULL REFERENCES evaluation ON DELETE CASCADE,
    eval        text NOT NULL,  -- attribute path
    derivation  bigint NOT NULL REFERENCES derivation ON DELETE CASCADE,
    task        bigint REFERENCES task ON DELETE CASCADE,
    PRIMARY KEY (evaluation, eval)
);
CREATE INDEX entry_point_derivation ON entry_point (derivation, evaluation);

CREATE TABLE evaluation_metric (
    evaluation        bigint PRIMARY KEY REFERENCES evaluation ON DELETE CASCADE,
    attributes        integer,
    derivations       integer,
    failed_attributes integer,
    fetch_ms          integer,
    eval_ms           integer,
    walk_ms           integer,
    peak_rss_mb       integer
);

CREATE TABLE phase_event (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    evaluation  bigint NOT NULL REFERENCES evaluation ON DELETE CASCADE,
    status      smallint NOT NULL,
    at          timestamptz NOT NULL
);
CREATE INDEX phase_event_evaluation ON phase_event (evaluation, id);

-- ---- clusters ------------------------------------------------------------------------------------

CREATE TABLE cluster_job (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status       smallint NOT NULL DEFAULT 0,
    same_zone    boolean NOT NULL DEFAULT false,
    attempts     integer NOT NULL DEFAULT 0,
    retry_budget integer NOT NULL DEFAULT 1,
    created_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL
);

CREATE TABLE cluster_member (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster_job  bigint NOT NULL REFERENCES cluster_job ON DELETE CASCADE,
    evaluation   bigint REFERENCES evaluation ON DELETE CASCADE,
    derivation   bigint REFERENCES derivation_build ON DELETE CASCADE,
    role         text NOT NULL,
    is_primary   boolean NOT NULL DEFAULT false,
    pin          text,
    CHECK ((evaluation IS NULL) <> (derivation IS NULL))
);
CREATE UNIQUE INDEX cluster_member_evaluation ON cluster_member (evaluation) WHERE evaluation IS NOT NULL;
CREATE UNIQUE INDEX cluster_member_derivation ON cluster_member (derivation) WHERE derivation IS NOT NULL;

CREATE TABLE cluster_attempt (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster_job  bigint NOT NULL REFERENCES cluster_job ON DELETE CASCADE,
    outcome      smallint,
    created_at   timestamptz NOT NULL,
    started_at   timestamptz,
    finished_at  timestamptz
);
CREATE UNIQUE INDEX cluster_attempt_open ON cluster_attempt (cluster_job) WHERE finished_at IS NULL;

-- ---- assignments and attempts --------------------------------------------------------------------

CREATE TABLE dispatched_job (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- the assignment_id
    kind            smallint NOT NULL,  -- JobKind
    job_id          text NOT NULL,      -- eval:<evaluation> or build:<derivation>
    -- Of a build: the evaluation it was dispatched for, which may go while the build runs.
    evaluation      bigint REFERENCES evaluation ON DELETE SET NULL,
    derivation      bigint REFERENCES derivation_build ON DELETE CASCADE,
    worker_id       uuid NOT NULL,
    worker_name     text,
    fetch_only      boolean NOT NULL DEFAULT false,
    score           double precision,
    score_breakdown jsonb,
    queued_at       timestamptz,
    dispatched_at   timestamptz NOT NULL,
    -- An abort was sent and not confirmed yet.
    abort_sent_at   timestamptz,
    finished_at     timestamptz,
    outcome         smallint,           -- DispatchOutcome; NULL while open
    timeline        jsonb,
    cluster_attempt bigint REFERENCES cluster_attempt ON DELETE SET NULL,
    CHECK ((finished_at IS NULL) = (outcome IS NULL))
);
CREATE UNIQUE INDEX dispatched_job_open_job ON dispatched_job (job_id) WHERE finished_at IS NULL;
CREATE INDEX dispatched_job_open_derivation ON dispatched_job (derivation) WHERE finished_at IS NULL;
CREATE INDEX dispatched_job_evaluation ON dispatched_job (evaluation) WHERE evaluation IS NOT NULL;

CREATE TABLE build_attempt (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    derivation     bigint NOT NULL REFERENCES derivation_build ON DELETE CASCADE,
    evaluation     bigint,  -- the evaluation it was dispatched for; NULL once that is gone
    dispatched_job bigint REFERENCES dispatched_job ON DELETE SET NULL,
    substitute     boolean NOT NULL DEFAULT false,
    outcome        smallint NOT NULL DEFAULT 0,
    reason         smallint,
    failure_message text,
    build_context  jsonb,
    created_at     timestamptz NOT NULL,
    build_started_at  timestamptz,
    build_finished_at timestamptz,
    FOREIGN KEY (evaluation, derivation) REFERENCES build_job ON DELETE SET NULL (evaluation)
);
CREATE INDEX build_attempt_derivation ON build_attempt (derivation, id DESC);
CREATE INDEX build_attempt_dispatched_job ON build_attempt (dispatched_job);
CREATE INDEX build_attempt_running ON build_attempt (id) WHERE outcome = 0;
CREATE INDEX build_attempt_build_job ON build_attempt (evaluation, derivation);

CREATE TABLE build_log_chunk (
    build_attempt bigint NOT NULL REFERENCES build_attempt ON DELETE CASCADE,
    chunk_index   integer NOT NULL,
    data          bytea NOT NULL,
    PRIMARY KEY (build_attempt, chunk_index)
);

CREATE TABLE build_product (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    derivation    bigint NOT NULL REFERENCES derivation_build ON DELETE CASCADE,
    output        text NOT NULL,
    file_type     text NOT NULL,
    subtype       text NOT NULL,
    name          text NOT NULL,
    path          text NOT NULL,
    size          bigint
);
CREATE INDEX build_product_derivation ON build_product (derivation);

CREATE TABLE derivation_metric (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    derivation        bigint REFERENCES derivation ON DELETE SET NULL,
    history_name      text NOT NULL,  -- pname, or the derivation's name
    architecture      text NOT NULL,
    build_time_ms     integer NOT NULL,
    peak_ram_mb       integer,
    cpu_time_ms       integer,
    avg_cpu_pct       real,
    disk_read_bytes   bigint,
    disk_write_bytes  bigint,
    oom_killed        boolean NOT NULL DEFAULT false,
    closure_size      bigint,
    concurrent_builds integer,
    build_cores       integer,
    cpu_core_score    integer,
    worker_id         uuid,
    created_at        timestamptz NOT NULL
);
CREATE INDEX derivation_metric_history ON derivation_metric (history_name, architecture, id DESC);

-- ---- the cache -----------------------------------------------------------------------------------

CREATE TABLE cached_path (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash        text NOT NULL UNIQUE,  -- hash part of the store path
    package     text NOT NULL,         -- name part
    nar_hash    text NOT NULL,         -- sha256:<nix32>
    nar_size    bigint NOT NULL,
    -- NULL: known, but its object is gone (not backed).
    file_hash   text,
    file_size   bigint,
    "references" text[] NOT NULL,      -- base names, in the order they came
    deriver     text,
    ca          text,
    created_at  timestamptz NOT NULL
);
CREATE INDEX cached_path_file_hash ON cached_path (file_hash);

-- Who refers to a path that a derivation may produce: the index behind runtime edges. Paths of `.drv`
-- files have no rows here: nothing depends on a `.drv` at run time.
CREATE TABLE cached_path_reference (
    cached_path bigint NOT NULL REFERENCES cached_path ON DELETE CASCADE,
    hash        text NOT NULL,
    PRIMARY KEY (cached_path, hash)
);
CREATE INDEX cached_path_reference_hash ON cached_path_reference (hash);

CREATE TABLE cached_path_signature (
    cached_path     bigint NOT NULL REFERENCES cached_path ON DELETE CASCADE,
    cache           bigint NOT NULL REFERENCES cache ON DELETE CASCADE,
    signature       text NOT NULL,
    last_fetched_at timestamptz,
    fetch_count     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (cached_path, cache)
);
