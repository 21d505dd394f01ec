"""What a person does to one build of an evaluation: abort, retry. Layer: web; docs/api.md has the shapes."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from quart import Response, request

from gradient.graph.evaluation_build import AbortBuild, BuildRefused, Refusal, RetryBuild
from gradient.graph.transaction import Message
from gradient.web.answers import json_answer
from gradient.web.errors import Conflict, NotFound
from gradient.web.inputs import read_optional_fields
from gradient.web.routes import ID, Route
from gradient.web.site import Site

T = TypeVar("T")


async def abort_build(site: Site, build: int) -> Response:
    """Abort it in an evaluation; what wants it there fails."""
    who, evaluation = await _asked(site)
    aborted = await _submit(site, AbortBuild(build, evaluation, who))
    return _answer(build, aborted.evaluation, dependency_failed=len(aborted.dependents))


async def retry_build(site: Site, build: int) -> Response:
    """Try it again, and open its evaluation again when it has ended."""
    who, evaluation = await _asked(site)
    retried = await _submit(site, RetryBuild(build, evaluation, who))
    return _answer(build, retried.evaluation, reopened=retried.reopened, retried=len(retried.builds))


async def _asked(site: Site) -> tuple[str, int | None]:
    """Who asks, and for which evaluation."""
    who = await site.gate.admit(request.headers.get("Authorization"))
    fields = await read_optional_fields()
    evaluation = fields.number("evaluation")
    fields.end()
    return who, evaluation


async def _submit(site: Site, message: Message[T]) -> T:
    try:
        return await site.submit(message)
    except BuildRefused as error:
        kind = NotFound if error.refusal is Refusal.NOT_NAMED else Conflict
        raise kind(str(error)) from error


def _answer(build: int, evaluation: int, **done: Any) -> Response:
    return json_answer({"build": build, "evaluation": evaluation, **done}, 202)


ROUTES: Final = (
    Route("POST", f"/api/v1/builds/<{ID}:build>/abort", abort_build),
    Route("POST", f"/api/v1/builds/<{ID}:build>/retry", retry_build),
)
