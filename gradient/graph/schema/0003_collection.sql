-- What the collection of garbage needs: promises, walks that were overtaken, objects to remove, and an index
-- for each reference that a deleted row must be looked up by.

-- When the server last told somebody that it has this, so that it was not sent again.
ALTER TABLE derivation ADD COLUMN promised_at timestamptz;
ALTER TABLE cached_path ADD COLUMN promised_at timestamptz;

-- Something was un-walked while this evaluation was walking: it may have stopped there as known.
ALTER TABLE evaluation ADD COLUMN walk_lost boolean NOT NULL DEFAULT false;

-- Objects of retired paths, until they are removed. A path may come and go again before that: one row a
-- retirement.
CREATE TABLE retired_nar (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hash        text NOT NULL,
    package     text NOT NULL,
    retired_at  timestamptz NOT NULL
);

CREATE INDEX derivation_input_source_hash ON derivation_input_source (hash);
CREATE INDEX derivation_metric_derivation ON derivation_metric (derivation) WHERE derivation IS NOT NULL;
CREATE INDEX dispatched_job_derivation ON dispatched_job (derivation) WHERE derivation IS NOT NULL;
CREATE INDEX evaluation_previous ON evaluation (previous) WHERE previous IS NOT NULL;
CREATE INDEX evaluation_next ON evaluation (next) WHERE next IS NOT NULL;
CREATE INDEX evaluation_flake_source ON evaluation (substr(flake_source ->> 'store_path', 12, 32))
    WHERE flake_source IS NOT NULL;
