-- The graph writer's last commit: one row, written by every transaction of the writer that changes anything.
-- After a connection that was lost at COMMIT it says whether that arrived (docs/adr/0022).
CREATE TABLE writer_commit (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    token     uuid
);
INSERT INTO writer_commit DEFAULT VALUES;
