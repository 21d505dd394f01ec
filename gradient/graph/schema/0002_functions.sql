-- Transitive spreads and the evaluation delta ledger. Each predicate written out here must match
-- gradient/graph/predicates.py word for word; tests/graph/test_predicates.py holds them together.

-- A set of shared builds whose closure became complete (direction -1) or stopped being so (+1): move
-- missing_runtime_deps of everything above them, level by level, locking each level in derivation
-- order. Returns the rows beyond the frontier whose own completeness flipped by it.
CREATE FUNCTION ripple_missing_runtime_deps(frontier bigint[], direction integer)
RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    level bigint[] := frontier;
BEGIN
    WHILE cardinality(level) > 0 LOOP
        WITH moved AS (
            SELECT e.derivation, count(*)::integer AS edges
            FROM derivation_dependency e
            WHERE e.dependency = ANY (level) AND e.kind IN (1, 2)
            GROUP BY e.derivation
        ), locked AS (
            SELECT b.derivation, b.missing_runtime_deps AS before
            FROM derivation_build b JOIN moved m ON m.derivation = b.derivation
            ORDER BY b.derivation FOR NO KEY UPDATE OF b
        ), written AS (
            UPDATE derivation_build b
            SET missing_runtime_deps = b.missing_runtime_deps + direction * m.edges
            FROM moved m JOIN locked l ON l.derivation = m.derivation
            WHERE b.derivation = m.derivation
            RETURNING b.derivation, l.before, b.missing_runtime_deps AS after
        )
        SELECT coalesce(array_agg(w.derivation ORDER BY w.derivation), '{}') INTO level
        FROM written w
        WHERE ((direction < 0 AND w.after = 0) OR (direction > 0 AND w.before = 0))
          AND EXISTS (SELECT FROM derivation_output o WHERE o.derivation = w.derivation)
          AND NOT EXISTS (SELECT FROM derivation_output o WHERE o.derivation = w.derivation AND NOT o.is_cached);
        RETURN QUERY SELECT unnest(level);
    END LOOP;
END $$;

-- The same for derivations whose subtree became recorded (-1) or stopped being so (+1).
CREATE FUNCTION ripple_unwalked_inputs(frontier bigint[], direction integer)
RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
    level bigint[] := frontier;
BEGIN
    WHILE cardinality(level) > 0 LOOP
        WITH moved AS (
            SELECT e.derivation, count(*)::integer AS edges
            FROM derivation_dependency e
            WHERE e.dependency = ANY (level) AND e.kind IN (0, 2)
            GROUP BY e.derivation
        ), locked AS (
            SELECT d.id, d.walked, d.unwalked_inputs AS before
            FROM derivation d JOIN moved m ON m.derivation = d.id
            ORDER BY d.id FOR NO KEY UPDATE OF d
        ), written AS (
            UPDATE derivation d
            SET unwalked_inputs = d.unwalked_inputs + direction * m.edges
            FROM moved m JOIN locked l ON l.id = m.derivation
            WHERE d.id = m.derivation
            RETURNING d.id, l.walked, l.before, d.unwalked_inputs AS after
        )
        SELECT coalesce(array_agg(w.id ORDER BY w.id), '{}') INTO level
        FROM written w
        WHERE ((direction < 0 AND w.after = 0) OR (direction > 0 AND w.before = 0))
          AND w.walked;
        RETURN QUERY SELECT unnest(level);
    END LOOP;
END $$;

-- What one named shared build counts for in its evaluation.
CREATE FUNCTION evaluation_shared_build_counts(
    status smallint, wanted boolean,
    OUT active integer, OUT failed integer, OUT queued integer, OUT building integer
) LANGUAGE sql IMMUTABLE AS $$
    SELECT ((status IN (0, 1, 2, 8, 10) AND wanted) OR status IN (1, 2))::integer,
           (status IN (4, 5, 6, 9))::integer,
           (status = 1)::integer,
           (status = 2)::integer
$$;

CREATE FUNCTION evaluation_shared_build_moved() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was record;
    now_is record;
BEGIN
    was := evaluation_shared_build_counts(OLD.status, OLD.wanted);
    now_is := evaluation_shared_build_counts(NEW.status, NEW.wanted);
    IF was = now_is THEN
        RETURN NULL;
    END IF;
    INSERT INTO evaluation_shared_build_delta (evaluation, named, active, failed, queued, building)
    SELECT j.evaluation, 0, now_is.active - was.active, now_is.failed - was.failed,
           now_is.queued - was.queued, now_is.building - was.building
    FROM build_job j JOIN evaluation v ON v.id = j.evaluation
    WHERE j.derivation = NEW.derivation AND v.status IN (0, 1, 2, 3, 4, 8);
    RETURN NULL;
END $$;

CREATE FUNCTION evaluation_shared_build_named() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    sign integer := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
BEGIN
    INSERT INTO evaluation_shared_build_delta (evaluation, named, active, failed, queued, building)
    SELECT j.evaluation, sign * count(*), sign * sum(c.active), sign * sum(c.failed),
           sign * sum(c.queued), sign * sum(c.building)
    FROM touched j
    JOIN evaluation v ON v.id = j.evaluation
    JOIN derivation_build b ON b.derivation = j.derivation,
    LATERAL evaluation_shared_build_counts(b.status, b.wanted) c
    WHERE v.status IN (0, 1, 2, 3, 4, 8)
    GROUP BY j.evaluation;
    RETURN NULL;
END $$;

CREATE TRIGGER evaluation_shared_build_moved
    AFTER UPDATE OF status, wanted ON derivation_build
    FOR EACH ROW
    WHEN (OLD.status <> NEW.status OR OLD.wanted <> NEW.wanted)
    EXECUTE FUNCTION evaluation_shared_build_moved();

CREATE TRIGGER evaluation_shared_build_named
    AFTER INSERT ON build_job REFERENCING NEW TABLE AS touched
    FOR EACH STATEMENT EXECUTE FUNCTION evaluation_shared_build_named();

CREATE TRIGGER evaluation_shared_build_unnamed
    AFTER DELETE ON build_job REFERENCING OLD TABLE AS touched
    FOR EACH STATEMENT EXECUTE FUNCTION evaluation_shared_build_named();
