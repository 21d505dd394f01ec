"""A build job: inputs, build, log, outputs. Layer: worker.

    Building ─> all outputs here? ──────────────────────────┐
                └─> prefetch ─> build (live log, two clocks) ┴─> BuildOutput ─> upload ─> JobCompleted

Closing its daemon connection is what stops a build, so cancelling this is enough.
Source: seed "Jobs", Build Jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import trio

from gradient.model import BuildKind, BuildMetrics, BuildSpec, BuildStage, BuiltOutput, FailureKind
from gradient.nix.daemon.build_result import BuildResult, ResultStatus
from gradient.nix.daemon.connection import DaemonConnection
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.stderr import Message, log_line
from gradient.nix.hashes import Hash
from gradient.wire.messages import Building, BuildOutput
from gradient.worker.build_log import BuildLog
from gradient.worker.downloads import Downloader
from gradient.worker.drv_files import BuildPlan, DrvMissing, build_plan
from gradient.worker.errors import JobFault, build_failure_kind
from gradient.worker.job import Job
from gradient.worker.machine import Machine
from gradient.worker.products import read_products
from gradient.worker.store_info import path_infos
from gradient.worker.uploads import Uploader

# Kinds that need a Nix store are all that this worker does.
_UNSUPPORTED: Final = {
    BuildKind.SUBSTITUTE: "fetch outputs from an upstream cache",
    BuildKind.DOWNLOAD: "download a file for the builtin system",
}


@attrs.frozen
class _Built:
    """The outputs in the local store, and how they got there. `result` None: they were there before."""

    outputs: Mapping[str, str]
    result: BuildResult | None = None
    build_time_ms: int = 0


async def run_build_job(job: Job, spec: BuildSpec, machine: Machine, concurrent: int) -> None:
    """Build what `spec` names and upload it; returns when the upload is committed.

    `concurrent` is how many builds run here now, for the metrics. Raises what `errors.failure_of` knows,
    alone or in a group. Cancelled, the builder and its children are gone when this has ended."""
    await trio.lowlevel.checkpoint()  # an abort that came first: nothing has begun then
    await job.send(Building(*job.key, spec.build_id))
    if spec.kind in _UNSUPPORTED:
        raise JobFault(FailureKind.PERMANENT, f"this worker cannot {_UNSUPPORTED[spec.kind]}")
    built = await _obtain(job, spec, machine)
    infos = await path_infos(machine, built.outputs.values())
    await job.send(
        BuildOutput(
            *job.key,
            spec.build_id,
            outputs=await _described(built.outputs, infos),
            substituted=built.result is None,
            metrics=_metrics(built, machine, concurrent),
        )
    )
    await job.enter(BuildStage.UPLOAD)
    with job.timeline.span("nar_push") as counted:
        counted.paths, counted.bytes = len(infos), sum(info.nar_size for info in infos)
        uploader = Uploader(job, machine)
        if built.result is None:
            await uploader.upload(built.outputs.values())
        else:
            await uploader.upload_new(infos)


async def _obtain(job: Job, spec: BuildSpec, machine: Machine) -> _Built:
    """Have the outputs in the local store: find them there, or build them."""
    wanted = {output.name: output.path for output in spec.outputs}
    plan = await _plan(job, spec, machine)
    asked = [*filter(None, wanted.values()), spec.drv_path, *(plan.inputs if plan else ())]
    async with machine.store.connection() as store:
        valid = await store.query_valid_paths(asked)
    if wanted and all(path in valid for path in wanted.values()):
        return _Built(wanted)
    if plan is None or not valid.issuperset((spec.drv_path, *plan.inputs)):
        await job.enter(BuildStage.PREFETCH)
        with job.timeline.span("prefetch"):
            await _prefetch(job, spec, machine)
    await job.enter(BuildStage.BUILD)
    with job.timeline.span("build"):
        return await _build(job, spec, machine)


async def _plan(job: Job, spec: BuildSpec, machine: Machine) -> BuildPlan | None:
    """What the build needs; None when some `.drv` it takes to know that is not here."""
    try:
        return await trio.to_thread.run_sync(build_plan, spec.drv_path)
    except DrvMissing:
        return None


async def _prefetch(job: Job, spec: BuildSpec, machine: Machine) -> None:
    downloader = Downloader(job, machine)
    await downloader.make_valid([spec.drv_path])
    plan = await _plan(job, spec, machine)
    if plan is None:
        raise JobFault(FailureKind.TRANSIENT, f"{spec.drv_path} has vanished from the local store")
    await downloader.make_valid(plan.inputs)


async def _build(job: Job, spec: BuildSpec, machine: Machine) -> _Built:
    log = BuildLog(job, machine.settings.log)
    began = trio.current_time()
    async with machine.builders.connection() as daemon, trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        result = await _within_limits(daemon, spec, log)
        nursery.cancel_scope.cancel()
    await log.flush()
    if not result.success:
        raise _failure(spec, result)
    return _Built(
        outputs=_outputs(spec, result),
        result=result,
        build_time_ms=round((trio.current_time() - began) * 1000),
    )


async def _within_limits(daemon: DaemonConnection, spec: BuildSpec, log: BuildLog) -> BuildResult:
    """Run the build; raises JobFault (Timeout) when it takes too long or is silent for too long.

    A log that the server does not take is not the builder's silence, so its wait is not counted."""
    silence = trio.CancelScope()

    async def listen(message: Message) -> None:
        if (line := log_line(message)) is not None:
            silence.deadline = float("inf")
            await log.add(line)
        silence.deadline = trio.current_time() + spec.max_silent_secs

    with trio.move_on_after(spec.timeout_secs):
        silence.deadline = trio.current_time() + spec.max_silent_secs
        with silence:
            results = await daemon.build_paths_with_results([f"{spec.drv_path}!*"], on_message=listen)
            return _only(spec, results)
        await log.flush()
        raise JobFault(FailureKind.TIMEOUT, f"the build printed nothing for {spec.max_silent_secs} s")
    await log.flush()
    raise JobFault(FailureKind.TIMEOUT, f"the build took longer than {spec.timeout_secs} s")


def _only(spec: BuildSpec, results: Sequence[BuildResult]) -> BuildResult:
    for result in results:
        if result.derived_path.partition("!")[0].partition("^")[0] == spec.drv_path:
            return result
    raise JobFault(FailureKind.TRANSIENT, "the Nix daemon gave no result for the build")


def _failure(spec: BuildSpec, result: BuildResult) -> JobFault:
    text = result.error or f"the build of {spec.drv_path} failed"
    match result.status:
        case ResultStatus.TIMED_OUT:
            return JobFault(FailureKind.TIMEOUT, text)
        case ResultStatus.TRANSIENT_FAILURE:
            return JobFault(FailureKind.TRANSIENT, text)
        case _:
            return JobFault(build_failure_kind(text), text)


def _outputs(spec: BuildSpec, result: BuildResult) -> dict[str, str]:
    """Name -> path. The daemon's word where it gives one: floating outputs have no path before."""
    known = {output.name: output.path for output in spec.outputs if output.path}
    return known | result.outputs


async def _described(outputs: Mapping[str, str], infos: Sequence[PathInfo]) -> tuple[BuiltOutput, ...]:
    paths = tuple(outputs.values())
    products = await trio.to_thread.run_sync(lambda: [read_products(path, paths) for path in paths])
    return tuple(
        BuiltOutput(name, info.path, info.nar_size, Hash.parse(info.nar_hash, "sha256").nix32(), found)
        for name, info, found in zip(outputs, infos, products, strict=True)
    )


def _metrics(built: _Built, machine: Machine, concurrent: int) -> BuildMetrics | None:
    if built.result is None:
        return None
    cpu = (built.result.cpu_user_us, built.result.cpu_system_us)
    return BuildMetrics(
        build_time_ms=built.build_time_ms,
        cpu_time_ms=None if cpu[0] is None or cpu[1] is None else round((cpu[0] + cpu[1]) / 1000),
        concurrent_builds=concurrent,
        build_cores=machine.host.cores,
    )
