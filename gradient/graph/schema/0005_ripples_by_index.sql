-- The transitive spreads as in 0002, by index at every level: nobody can estimate a level, and a plan that
-- reads a table for each of ten thousand levels takes minutes. Each level is joined to the tables only, so
-- nested loops are right for the widest one too, and one plan is right for all levels.

CREATE OR REPLACE FUNCTION ripple_missing_runtime_deps(frontier bigint[], direction integer)
RETURNS SETOF bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan AS $$
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
            SELECT b.derivation, b.missing_runtime_deps AS before, m.edges
            FROM moved m JOIN derivation_build b ON b.derivation = m.derivation
            ORDER BY b.derivation FOR NO KEY UPDATE OF b
        ), written AS (
            UPDATE derivation_build b
            SET missing_runtime_deps = b.missing_runtime_deps + direction * l.edges
            FROM locked l WHERE b.derivation = l.derivation
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

CREATE OR REPLACE FUNCTION ripple_unwalked_inputs(frontier bigint[], direction integer)
RETURNS SETOF bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan AS $$
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
            SELECT d.id, d.walked, d.unwalked_inputs AS before, m.edges
            FROM moved m JOIN derivation d ON d.id = m.derivation
            ORDER BY d.id FOR NO KEY UPDATE OF d
        ), written AS (
            UPDATE derivation d
            SET unwalked_inputs = d.unwalked_inputs + direction * l.edges
            FROM locked l WHERE d.id = l.id
            RETURNING d.id, l.walked, l.before, d.unwalked_inputs AS after
        )
        SELECT coalesce(array_agg(w.id ORDER BY w.id), '{}') INTO level
        FROM written w
        WHERE ((direction < 0 AND w.after = 0) OR (direction > 0 AND w.before = 0))
          AND w.walked;
        RETURN QUERY SELECT unnest(level);
    END LOOP;
END $$;
