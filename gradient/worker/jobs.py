"""From an assignment to the code that does it. Layer: worker."""

from __future__ import annotations

from gradient.wire.messages import AssignJob
from gradient.worker.build_job import run_build_job
from gradient.worker.flake_job import run_flake_job
from gradient.worker.job import Job
from gradient.worker.machine import Machine


async def execute(machine: Machine, job: Job, assign: AssignJob, builds: int) -> None:
    """Do the job; `builds` is how many builds run now. Raises what `errors.failure_of` knows."""
    if assign.flake is not None:
        await run_flake_job(job, assign.flake, machine)
    elif assign.build is not None:
        await run_build_job(job, assign.build, machine, builds)
