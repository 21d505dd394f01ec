"""Primitives of supervision: root nursery, supervised children, periodic passes, drain, stop window.

Layer: rank 0. Knows nothing of Nix or the database; imports trio, attrs and structlog only.

    root.py         composition root of a process: start, wait for a stop, drain, cancel
    signals.py      SIGTERM and SIGINT as a wish to stop
    drain.py        a sequence of named phases, each with its deadline
    supervise.py    restarts a service on the errors it may have
    periodic.py     runs a pass again and again inside a budget
    kick.py         wakes a pass early, from synchronous code
    backoff.py      pauses that double
    health.py       what each child is doing, readable from outside
    stop_window.py  running jobs, and the time they get to report after a stop
"""
