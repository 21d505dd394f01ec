"""Conversations recorded with real daemons: our requests are the recorded ones, their answers our values.

`python tests/unit/test_daemon_recorded.py NIX FILE` records one with the daemon beside the binary NIX.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from gradient.nix.daemon.address import find_daemon
from gradient.nix.daemon.build_result import ResultStatus
from gradient.nix.daemon.connection import DaemonConnection, greet
from gradient.nix.daemon.errors import DaemonFailure, DaemonGone
from gradient.nix.daemon.operations import AddMethod
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.stderr import Message, log_line
from gradient.nix.daemon.transport import Transport, open_transport
from tests.unit.daemon_support import Replay

MISSING = "/nix/store/00000000000000000000000000000000-missing"
OPTIONS = DaemonOptions(timeout=600, extra=(("substitute", "false"),))
RECORDINGS = sorted(Path(__file__).parent.glob("test_daemon_recorded_*.json"))


async def conversation(connection: DaemonConnection, good: str, bad: str) -> dict[str, Any]:
    """One of each operation. `good` and `bad` are derivations, one of which fails."""
    log: list[str] = []

    def listen(message: Message) -> None:
        if (line := log_line(message)) is not None:
            log.append(line)

    text = await connection.add_to_store("greeting.txt", AddMethod.TEXT, [b"hel", b"lo"])
    async with connection.nar_from_path(text.path) as chunks:
        nar = b"".join([chunk async for chunk in chunks])
    await connection.add_temp_root(text.path)
    return {
        "info": connection.info,
        "text": text,
        "nar": nar,
        "copy": await connection.add_to_store("copy", AddMethod.RECURSIVE, [nar]),
        "again": await connection.query_path_info(text.path),
        "missing": await connection.query_path_info(MISSING),
        "valid": [await connection.is_valid_path(path) for path in (text.path, MISSING)],
        "valid_of": await connection.query_valid_paths([text.path, MISSING]),
        "outputs": await connection.query_derivation_output_map(good),
        "good": await connection.build_paths_with_results([f"{good}!*"], on_message=listen),
        "bad": await connection.build_paths_with_results([f"{bad}!*"], on_message=listen),
        "log": log,
    }


@attrs.frozen
class Recording:
    """What was said. `received`: each piece with the number of bytes we had sent before it came."""

    info: tuple[int, str, bool | None]
    good: str
    bad: str
    sent: bytes
    received: list[tuple[int, bytes]]

    @classmethod
    def load(cls, path: Path) -> Recording:
        data = json.loads(path.read_text())
        received = [(after, bytes.fromhex(piece)) for after, piece in data["received"]]
        return cls(tuple(data["info"]), data["good"], data["bad"], bytes.fromhex(data["sent"]), received)

    def replay(self, received: list[tuple[int, bytes]]) -> tuple[dict[str, Any], bytes]:
        """The conversation's values when the daemon says `received` instead, and what we sent.

        Raises `trio.TooSlowError` when both sides wait for each other.
        """
        stream = Replay(received)

        async def run() -> dict[str, Any]:
            with trio.fail_after(10):
                connection = await greet(Transport(stream), OPTIONS)
                return await conversation(connection, self.good, self.bad)

        return trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0)), bytes(stream.sent)


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem.removeprefix("test_daemon_recorded_"))
def recording(request: pytest.FixtureRequest) -> Recording:
    return Recording.load(request.param)


def drawn(data: st.DataObject) -> Recording:
    return Recording.load(data.draw(st.sampled_from(RECORDINGS)))


def test_both_versions_are_recorded() -> None:
    assert [path.stem[-4:] for path in RECORDINGS] == ["1_34", "1_38"]


def test_a_recorded_conversation(recording: Recording) -> None:
    values, sent = recording.replay(recording.received)
    assert sent == recording.sent
    info = values["info"]
    assert (info.minor, info.nix_version, info.trusted) == recording.info
    text = values["text"]
    assert text.path == "/nix/store/0q6yv2alszy3ij8bisdsahrwabxhghmg-greeting.txt"
    assert text.nar_hash == "0a430879c266f8b57f4092a0f935cf3facd48bbccde5760d4748ca405171e969"
    assert (text.nar_size, text.references, text.deriver, text.signatures) == (120, (), None, ())
    assert text.ca == "text:sha256:094qif9n4cq4fdg459qzbhg1c6wywawwaaivx0k0x8xhbyx4vwic"
    assert (len(values["nar"]), values["copy"].nar_hash) == (120, text.nar_hash)
    assert values["again"] == text
    assert values["missing"] is None
    assert values["valid"] == [True, False]
    assert values["valid_of"] == {text.path}


def test_recorded_builds(recording: Recording) -> None:
    values, _ = recording.replay(recording.received)
    (good,), (bad,) = values["good"], values["bad"]
    assert [good.derived_path, bad.derived_path] == [recording.good + "!*", recording.bad + "!*"]
    assert (good.status, good.success, good.error) == (ResultStatus.BUILT, True, "")
    assert set(good.outputs) == {"out", "dev"}
    assert good.outputs == values["outputs"]
    # Nix 2.34 does not say when it built.
    assert good.stopped >= good.started > (1_700_000_000 if recording.info[0] == 34 else -1)
    assert (bad.success, bad.outputs) == (False, {})
    assert "failed with exit code 3" in bad.error
    assert "\x1b" not in bad.error
    assert {"hello from good", "and from its stderr", "hello from bad"} <= set(values["log"])


@given(st.data())
@settings(max_examples=40)
def test_any_split_gives_the_same_values(data: st.DataObject) -> None:
    recording = drawn(data)
    size = data.draw(st.integers(1, 700))
    first = data.draw(st.integers(1, size))
    pieces = []
    for after, piece in recording.received:
        pieces.append((after, piece[:first]))
        pieces += [(after, piece[at : at + size]) for at in range(first, len(piece), size)]
    assert recording.replay(pieces)[0] == recording.replay(recording.received)[0]


@given(st.data())
@settings(max_examples=40)
def test_a_daemon_that_dies_anywhere_is_gone(data: st.DataObject) -> None:
    recording = drawn(data)
    index = data.draw(st.integers(0, len(recording.received) - 1))
    after, piece = recording.received[index]
    end = data.draw(st.integers(0, len(piece) - 1))
    with pytest.raises(DaemonGone):
        recording.replay([*recording.received[:index], (after, piece[:end])])


@given(st.data())
@settings(max_examples=60)
def test_a_flipped_bit_is_a_value_or_an_error_of_ours(data: st.DataObject) -> None:
    recording = drawn(data)
    received = list(recording.received)
    index = data.draw(st.integers(0, len(received) - 1))
    after, piece = received[index]
    at = data.draw(st.integers(0, len(piece) - 1))
    flipped = bytes([piece[at] ^ 1 << data.draw(st.integers(0, 7))])
    received[index] = (after, piece[:at] + flipped + piece[at + 1 :])
    with suppress(DaemonFailure, trio.TooSlowError):
        recording.replay(received)


# --- recording ----------------------------------------------------------------------------------------


class Tee(trio.abc.Stream):
    """Passes everything on and keeps it."""

    def __init__(self, inner: trio.abc.Stream) -> None:
        self._inner = inner
        self.sent = bytearray()
        self.received: list[tuple[int, str]] = []

    async def send_all(self, data: bytes) -> None:
        self.sent += data
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._inner.receive_some(max_bytes))
        self.received.append((len(self.sent), data.hex()))
        return data

    async def aclose(self) -> None:
        await self._inner.aclose()


def instantiate(name: str, script: str) -> str:
    expression = (
        f'derivation {{ name = "{name}"; system = builtins.currentSystem; builder = "/bin/sh"; '
        f'outputs = ["out" "dev"]; salt = "{time.time_ns()}"; args = ["-c" "{script}"]; }}'
    )
    with tempfile.NamedTemporaryFile("w", suffix=".nix") as file:
        file.write(expression)
        file.flush()
        argv = ["nix-instantiate", file.name, "--option", "substitute", "false"]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


async def record(nix: str) -> dict[str, Any]:
    good = instantiate("good", "echo hello from good; echo and from its stderr >&2; echo > $out; echo > $dev")
    bad = instantiate("bad", "echo hello from bad; exit 3")
    transport = await open_transport(await find_daemon(nix))
    tee = Tee(transport.stream)
    transport.stream = tee
    async with await greet(transport, OPTIONS) as connection:
        await conversation(connection, good, bad)
        info = connection.info
    return {
        "info": [info.minor, info.nix_version, info.trusted],
        "good": good,
        "bad": bad,
        "sent": tee.sent.hex(),
        "received": tee.received,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(trio.run(record, sys.argv[1]), indent=1) + "\n")
