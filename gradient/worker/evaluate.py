"""One evaluation: discovery by the evaluator, the closure walk, and the publishing of both. Layer: worker.

discover ── findings ──> walk ── batches ──> publisher ──> server
   └── imports from derivations ──> proxy ──┘ (they too are walked and published)
"""

from __future__ import annotations

from typing import Final

import trio

from gradient.model import CachedSource, FlakeJob
from gradient.nar.tree import Directory, regular_file
from gradient.nix.daemon.proxy import DaemonProxy
from gradient.nix.evaluator.discover import Request, discover
from gradient.nix.evaluator.findings import FlakeAddress, Progress
from gradient.nix.flake_ref import evaluation_url
from gradient.nix.flake_wrapper import INPUT_NAME, wrap_flake
from gradient.nix.wildcard import default_wildcards, parse_wildcards
from gradient.wire.messages import EvalProgress, EvalResult, EvalStats, EvaluatingDerivations
from gradient.worker.closure_walk import ClosureWalk, Found
from gradient.worker.downloads import Downloader
from gradient.worker.fetch import add_source
from gradient.worker.imports import Imports
from gradient.worker.inputs import Inputs
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.publish import Publisher
from gradient.worker.targets import whole_names
from gradient.worker.uploads import Uploader

# Findings that may wait for the walk: it takes them all when it has read a wave.
FINDINGS: Final = 256
PROGRESS_INTERVAL: Final = 1.0  # seconds; the least between two messages
PROGRESS_RESEND: Final = 30  # intervals without a change after which it is said again
_MIB: Final = 2**20


async def evaluate(
    job: Job,
    spec: FlakeJob,
    source: CachedSource,
    inputs: Inputs,
    machine: Machine,
    downloader: Downloader,
    progress: Progress,
) -> None:
    """Evaluate what the job's wildcards select and publish every derivation below it; counts in `progress`.

    Raises what `errors.failure_of` knows, in a group. An attribute that fails is reported and no error."""
    await job.send(EvaluatingDerivations(*job.key))
    began = trio.current_time()
    to_walk, found = trio.open_memory_channel[Found](FINDINGS)
    publisher = Publisher(job, Uploader(job, machine))
    walk = ClosureWalk(job, publisher, found, full=spec.full_walk)
    texts = spec.wildcards or default_wildcards(machine.host.systems)
    async with trio.open_nursery() as beside:
        beside.start_soon(_tell_progress, job, progress, walk)
        imports = Imports(job, machine, downloader, to_walk)
        async with machine.store.connection() as store:
            proxy = DaemonProxy(machine.store.address, imports.build, store.info.minor)
        flake = await _flake_address(source, inputs, machine)
        request = Request(
            flake,
            parse_wildcards(await whole_names(machine.evaluators, flake, texts, machine.host.systems)),
            import_store=await beside.start(proxy.run),
        )
        async with trio.open_nursery() as walking:
            walking.start_soon(publisher.run)
            walking.start_soon(walk.run)
            async with to_walk:
                await discover(machine.evaluators, request, to_walk.clone(), progress)
        beside.cancel_scope.cancel()
    errors = _target_errors(spec, walk, progress)
    await job.send(EvalResult(*job.key, warnings=walk.warnings, errors=errors))
    await job.send(
        EvalStats(
            *job.key,
            attributes=walk.attributes,
            derivations=walk.derivations,
            failed_attributes=progress.failed + walk.failed,
            eval_ms=round((trio.current_time() - began) * 1000),
            peak_rss_mb=machine.evaluators.peak_rss // _MIB or None,
        )
    )


async def _flake_address(source: CachedSource, inputs: Inputs, machine: Machine) -> FlakeAddress:
    """Where evaluation finds the flake: a flake below the top of its source goes through a wrapper."""
    urls = tuple(url for locked in inputs.locked.values() for url in locked.asked_urls)
    if not source.dir:
        return FlakeAddress(evaluation_url(source), input_urls=urls)
    wrapper = wrap_flake(source, inputs.lock)
    files = (("flake.lock", wrapper.flake_lock), ("flake.nix", wrapper.flake_nix))
    tree = Directory([(name.encode(), regular_file(text.encode())) for name, text in files])
    path, nar_hash = await add_source(tree, machine)
    return FlakeAddress(evaluation_url(CachedSource(path, nar_hash=nar_hash)), INPUT_NAME, urls)


def _target_errors(spec: FlakeJob, walk: ClosureWalk, progress: Progress) -> tuple[str, ...]:
    """A target that was asked for and led to nothing is an error; a default one only if all did.

    An attribute that fails to evaluate is something."""
    if spec.wildcards:
        return tuple(target.message for target in walk.unmatched)
    if walk.attributes == progress.failed + walk.failed == 0 and walk.unmatched:
        return ("the flake has no packages and no checks for the systems of this worker",)
    return ()


async def _tell_progress(job: Job, progress: Progress, walk: ClosureWalk) -> None:
    """Send the counts when they changed, once a second at most, and now and then when they did not."""
    told, since = None, 0
    while True:
        await trio.sleep(PROGRESS_INTERVAL)
        since += 1
        report = EvalProgress(*job.key, progress.attributes_done, progress.attributes_total, walk.derivations)
        if report != told or since >= PROGRESS_RESEND:
            await job.send(report)
            told, since = report, 0
