"""The scheduler: worker pool, candidates, scoring, assignment, the waiting pass. Layer: rank 3."""
