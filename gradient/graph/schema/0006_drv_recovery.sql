-- The evaluation that a recovery walks again, because it waits for a `.drv` that was lost.
ALTER TABLE evaluation ADD COLUMN recovers bigint REFERENCES evaluation ON DELETE SET NULL;
CREATE INDEX evaluation_recovers ON evaluation (recovers) WHERE recovers IS NOT NULL;
