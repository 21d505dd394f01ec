"""From a candidate to the job a worker gets. Pure. Source: seed "Jobs", Flake Jobs and Build Jobs."""

from __future__ import annotations

from typing import Final

from gradient.graph.candidate_reads import BuildCandidate, EvaluationCandidate
from gradient.model import BuildKind, BuildSpec, FlakeJob, FlakeStep, WalkMode
from gradient.settings.tables import Build

ALL_STEPS: Final = (FlakeStep.FETCH_FLAKE, FlakeStep.EVALUATE_FLAKE, FlakeStep.EVALUATE_DERIVATIONS)


def build_kind(candidate: BuildCandidate) -> BuildKind:
    """Substitute what an upstream cache has, download fixed outputs of `builtin`, build the rest."""
    if candidate.cache_available:
        return BuildKind.SUBSTITUTE
    if candidate.architecture == "builtin" and candidate.is_fixed_output:
        return BuildKind.DOWNLOAD
    return BuildKind.BUILD


def build_spec(candidate: BuildCandidate, settings: Build) -> BuildSpec:
    """The build job of a candidate; limits its derivation does not set come from the settings."""
    return BuildSpec(
        build_id=candidate.derivation,
        drv_path=candidate.drv_path,
        kind=build_kind(candidate),
        outputs=candidate.outputs,
        is_fixed_output=candidate.is_fixed_output,
        timeout_secs=candidate.timeout_secs or settings.default_timeout_secs,
        max_silent_secs=candidate.max_silent_secs or settings.default_max_silent_secs,
        architecture=candidate.architecture,
        required_features=candidate.required_features,
    )


def flake_job(candidate: EvaluationCandidate) -> FlakeJob:
    """The combined flake job of an evaluation."""
    return FlakeJob(
        steps=ALL_STEPS,
        repository=candidate.repository,
        cached=candidate.cached,
        wildcards=candidate.wildcards,
        input_overrides=candidate.input_overrides,
        full_walk=candidate.walk_mode is WalkMode.FULL,
    )
