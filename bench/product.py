"""A server and a worker of ours, as processes, and evaluations on them: what the product's figures measure.

Both are started as a user starts them, with their defaults, and the evaluation is created and watched over
the HTTP API, as `gradient build` does it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from gradient.cli.api import Api
from gradient.cli.flake_arg import Local
from gradient.cli.options import find_server
from gradient.cli.packing import hash_source, upload_source
from gradient.http.client import HttpClient
from gradient.model import EVALUATION_TERMINAL, EvaluationStatus
from gradient.settings import DataDir

# A figure that takes longer is none.
START_LIMIT: Final = 60.0  # seconds
RUN_LIMIT: Final = 300.0  # seconds, of one evaluation
STOP_LIMIT: Final = 30.0  # seconds

_POLL: Final = 0.05  # seconds
_COMMAND: Final = (sys.executable, "-m", "gradient")
_ANY_PORT: Final = "127.0.0.1:0"
# Events that tell the evaluation's status; those of builds have a field of that name, too.
_OF_EVALUATION: Final = frozenset({"snapshot", "evaluation", "end"})


class BenchFailed(Exception):
    """What was to be measured did not happen."""


@attrs.frozen
class Product:
    """A running server with one worker, connected; `data` is their data directory."""

    data: Path

    async def listens(self) -> bool:
        """Whether the server can be asked."""
        return await trio.Path(DataDir(self.data).http_url).exists()

    async def has_worker(self) -> bool:
        """Whether the worker is connected."""
        async with HttpClient() as client:
            return bool((await self._api(client).status())["workers"])

    def evaluate(self, flake: Path, until: EvaluationStatus) -> float:
        """Evaluate and build every package of a folder; the seconds from creating the evaluation until its
        watcher sees the status `until`. The source is uploaded before, and nothing runs any more after: an
        evaluation that has not ended by then is aborted. Raises BenchFailed.
        """
        return trio.run(self._evaluate, flake, until)

    async def _evaluate(self, flake: Path, until: EvaluationStatus) -> float:
        with trio.fail_after(RUN_LIMIT):
            async with HttpClient() as client:
                api = self._api(client)
                source = await hash_source(Local(flake, whole_folder=True))
                await upload_source(api, source)
                start = time.perf_counter()
                created = await api.create_evaluation(source.source, ())
                await _reaches(api, created.evaluation, {until})
                seconds = time.perf_counter() - start
                if until not in EVALUATION_TERMINAL:
                    await api.abort(created.evaluation)
                    await _reaches(api, created.evaluation, EVALUATION_TERMINAL)
                return seconds

    def _api(self, client: HttpClient) -> Api:
        return Api(client, find_server(None, self.data, None, None))


@contextmanager
def running(data: Path, nix: str | None = None) -> Iterator[Product]:
    """A server and a worker on the data directory `data`, until the end of the block. `nix` as --nix."""
    product, options = Product(data), ("--data-dir", str(data))
    with _process("serve", *options, "--http", _ANY_PORT, "--proto", _ANY_PORT, log=data / "serve.log"):
        trio.run(_until, product.listens)
        with _process("work", *options, *(("--nix", nix) if nix else ()), log=data / "work.log"):
            trio.run(_until, product.has_worker)
            yield product


@contextmanager
def _process(command: str, *options: str, log: Path) -> Iterator[None]:
    """Run one of our commands. What it says goes to the file `log`, and is told when the block fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as said:
        process = subprocess.Popen((*_COMMAND, command, *options), stdout=said, stderr=said)
    try:
        yield
    except Exception as error:
        error.add_note(f"gradient {command} said: {log.read_text(errors='replace')[-2000:]}")
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        finally:
            process.kill()


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    with trio.fail_after(START_LIMIT):
        while True:
            if await holds():
                return
            await trio.sleep(_POLL)


async def _reaches(api: Api, evaluation: int, wanted: Collection[EvaluationStatus]) -> None:
    """Watch until the evaluation has one of these statuses. Raises BenchFailed when it ends otherwise."""
    labels = {status.label for status in wanted}
    async with api.events(evaluation) as events:
        while True:
            event = await events.next()
            if event.get("event") in _OF_EVALUATION and event["status"] in labels:
                return
            if event.get("event") == "end":
                raise BenchFailed(f"the evaluation ended as {event['status']}")
