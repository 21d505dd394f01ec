"""The worker's end of the protocol, and every store operation. Layer: rank 3; imports no psycopg.

connection.py    dials the server, again and again       session.py    one link: reader, heartbeat, slots
slots.py         who gets a slot, how a job ends         offers.py     scores what the server offers
queries.py       questions and answers, by id            metrics.py    what the heartbeat says
job.py           how a job speaks to the server          machine.py    the tools of every job
errors.py        what a failure means                    timeline.py   the phases of a job

flake_job.py     fetch and evaluate                      build_job.py  prefetch, build, upload
fetch.py         the source into the store               build_log.py  the live log, limited
inputs.py        its locked inputs                       products.py   what an output offers
evaluate.py      discovery, walk, publishing             drv_files.py  reading `.drv` files
walk.py          the order and the batches, pure         uploads.py    store paths into the cache
closure_walk.py  findings in, batches out                downloads.py  and out of it
publish.py       files first, then their EvalResult      imports.py    import from derivation

git_process.py, git_repo.py, source_tree.py              sources straight from git's objects
"""
