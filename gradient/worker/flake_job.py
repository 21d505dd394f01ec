"""A flake job: fetch, then evaluate, with the upload of the source beside it. Layer: worker.

Source: seed "Jobs", Flake Jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from gradient.model import CachedSource, FailureKind, FlakeJob, FlakeStep
from gradient.nix.evaluator.findings import Progress
from gradient.wire.messages import EvaluatingFlake, Fetching, FetchResult
from gradient.worker.downloads import Downloader
from gradient.worker.errors import JobFault
from gradient.worker.evaluate import evaluate
from gradient.worker.fetch import fetch_source
from gradient.worker.inputs import Inputs, fetch_inputs, read_inputs
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.uploads import Uploader

# Attributes that an error names: as many may be under way as there are evaluators.
MAX_NAMED: Final = 3


async def run_flake_job(job: Job, spec: FlakeJob, machine: Machine) -> None:
    """Do the steps of `spec`; returns when every upload is committed.

    Raises what `errors.failure_of` knows, alone or in a group. Cancelled, its children are killed."""
    if spec.input_overrides:
        raise JobFault(FailureKind.PERMANENT, "this worker cannot override the inputs of a flake")
    limit = spec.timeout_secs or machine.settings.eval.timeout_secs
    progress = Progress()
    with trio.move_on_after(limit) as scope:
        await _run_steps(job, spec, machine, progress)
    if scope.cancelled_caught:
        raise JobFault(FailureKind.TIMEOUT, f"the evaluation took longer than {limit} s{_at(progress)}")


def _at(progress: Progress) -> str:
    """What it was doing then, for whoever has to find the endless attribute."""
    at = sorted(progress.at)
    return f"; it was at {', '.join(at[:MAX_NAMED])}" if at else ""


async def _run_steps(job: Job, spec: FlakeJob, machine: Machine, progress: Progress) -> None:
    downloader = Downloader(job, machine)
    fetches = FlakeStep.FETCH_FLAKE in spec.steps
    if fetches:
        await job.send(Fetching(*job.key))
    source, inputs, paths = await _fetch(job, spec, machine, downloader)
    if fetches:
        await job.send(FetchResult(*job.key, source))
    async with trio.open_nursery() as nursery:
        if fetches:
            nursery.start_soon(_upload, job, machine, paths)
        if FlakeStep.EVALUATE_FLAKE in spec.steps:
            await job.send(EvaluatingFlake(*job.key))
        if FlakeStep.EVALUATE_DERIVATIONS in spec.steps:
            with job.timeline.span("eval_derivations"):
                await evaluate(job, spec, source, inputs, machine, downloader, progress)


async def _fetch(
    job: Job, spec: FlakeJob, machine: Machine, downloader: Downloader
) -> tuple[CachedSource, Inputs, list[str]]:
    """The source and its locked inputs in the local store; also all their paths."""
    with job.timeline.span("fetch") as counted:
        source = await fetch_source(spec, machine, downloader)
        inputs = await read_inputs(source)
        paths = [source.store_path, *await fetch_inputs(inputs, job, machine, downloader)]
        counted.paths = len(paths)
    return source, inputs, paths


async def _upload(job: Job, machine: Machine, paths: Sequence[str]) -> None:
    with job.timeline.span("push_inputs") as counted:
        counted.paths = len(paths)
        # An uploader of its own: the walk's batches must not wait for what is on its way here.
        await Uploader(job, machine).upload(paths)
