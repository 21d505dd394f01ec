"""The numbers that stand in tables and SQL bodies: pinned one by one, never renumbered."""

from __future__ import annotations

from enum import IntEnum

import pytest

from gradient import model

PINNED = {
    model.EvaluationStatus: "QUEUED EVALUATING_FLAKE EVALUATING_DERIVATION BUILDING WAITING COMPLETED FAILED "
    "ABORTED FETCHING",
    model.EvaluationKind: "NORMAL INPUT_UPDATE DRV_RECOVERY SSH",
    model.EvalCacheStatus: "NONE MISS HIT",
    model.WalkMode: "PRUNED FULL",
    model.ConcurrencyPolicy: "HARD_ABORT SOFT_ABORT ALL SKIP",
    model.TriggerType: "POLLING PUSH PULL_REQUEST TIME",
    model.BuildStatus: "CREATED QUEUED BUILDING COMPLETED FAILED_PERMANENT ABORTED DEPENDENCY_FAILED "
    "SUBSTITUTED FAILED_TRANSIENT FAILED_TIMEOUT SKIPPED",
    model.EdgeKind: "BUILD RUNTIME BOTH",
    model.AttemptOutcome: "RUNNING BUILT SUBSTITUTED FAILED ABORTED",
    model.AttemptReason: "SUBSTITUTE_UNAVAILABLE OOM DISK_FULL NETWORK BUILDER_CRASH BUILDER_NONZERO "
    "WALL_CLOCK_TIMEOUT SILENT_TIMEOUT INPUTS_UNAVAILABLE WORKER_LOST NOT_ENOUGH_RESOURCES",
    model.ClusterStatus: "QUEUED RUNNING COMPLETED FAILED ABORTED",
    model.ClusterOutcome: "SUCCEEDED FAILED PREPARE_FAILED ABORTED",
    model.JobKind: "EVAL BUILD",
    model.DispatchOutcome: "COMPLETED FAILED ABANDONED",
    model.FlakeStep: "FETCH_FLAKE EVALUATE_FLAKE EVALUATE_DERIVATIONS",
    model.BuildKind: "BUILD SUBSTITUTE DOWNLOAD",
    model.FailureKind: "TRANSIENT PERMANENT TIMEOUT SUBSTITUTE_UNAVAILABLE INPUTS_UNAVAILABLE "
    "CORRUPT_EVAL_CACHE ABORTED CANCELED",
    model.BuildStage: "PREFETCH BUILD UPLOAD",
    model.MessageLevel: "ERROR WARNING NOTICE",
}


@pytest.mark.parametrize("cls", PINNED, ids=lambda cls: cls.__name__)
def test_members_keep_their_numbers(cls: type[IntEnum]) -> None:
    assert [(member.name, int(member)) for member in cls] == [
        (name, number) for number, name in enumerate(PINNED[cls].split())
    ]


def test_every_enum_of_the_model_is_pinned() -> None:
    enums = {v for v in vars(model).values() if isinstance(v, type) and issubclass(v, IntEnum)} - {IntEnum}
    assert enums == set(PINNED)


def test_labels() -> None:
    assert model.BuildStatus.CREATED.label == model.BuildStatus.QUEUED.label == "Queued"
    assert model.BuildStatus.FAILED_PERMANENT.label == "FailedPermanent"
    assert model.EvaluationStatus.EVALUATING_DERIVATION.label == "EvaluatingDerivation"


@pytest.mark.parametrize(
    ("building", "uploading", "free"),
    [
        (0, 0, 2),
        (2, 0, 0),
        (0, 2, 2),  # an upload leaves its slot
        (1, 6, 1),
        (0, 7, 1),  # but uploads do not pile up
        (0, 8, 0),
        (2, 6, 0),
    ],
)
def test_free_build_slots(building: int, uploading: int, free: int) -> None:
    assert model.free_build_slots(2, building, uploading) == free
