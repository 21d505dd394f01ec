"""The commands. Layer: rank 6; the only importer of click and rich.

    app.py         the click group; one module per command: up, build, serve, work, log, status
    options.py     options that commands share, and the settings they make
    run.py         runs a command: signals in, exit code and the one line of a failure out
    faults.py      what is wrong, in words, with its exit code
    flake_arg.py   FLAKE[#WILDCARD] as `nix build` reads it; packing.py uploads what is local
    api.py         the server's HTTP API, typed; events.py its stream of lines
    progress.py    what is known of an evaluation, folded from events. Pure
    plain.py       the same as lines; tree.py as a live tree; display.py picks one of them
    follow.py      an evaluation from its creation to its end; outcome.py what is said of it then
    up_processes.py, worker_child.py   the processes of `gradient up`

Progress goes to stderr, results to stdout; with --json the last line of stdout is one object. Modules of
the server and heavy packages are imported where a command needs them: `gradient status` starts in 0.3 s.
"""
