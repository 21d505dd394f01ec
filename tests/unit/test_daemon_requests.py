"""Requests from the daemon's side: where each ends, what it wants built, options that build nothing."""

from __future__ import annotations

import pytest
import trio

from gradient.nix.daemon import handshake, operations, options
from gradient.nix.daemon.errors import DaemonProtocolError, DaemonTooOld
from gradient.nix.daemon.handshake import DaemonInfo
from gradient.nix.daemon.operations import AddMethod, BuildMode, Op, Operation
from gradient.nix.daemon.options import DaemonOptions
from gradient.nix.daemon.path_info import PathInfo
from gradient.nix.daemon.primitives import Decoder, pairs, read_strings, read_u64, string, strings, u64
from gradient.nix.daemon.requests import SHAPES, read_options_without_building, recorded
from gradient.nix.daemon.stream import DaemonStream
from gradient.nix.daemon.transport import Transport
from tests.unit.daemon_support import Replay

PATH = "/nix/store/0q6yv2alszy3ij8bisdsahrwabxhghmg-x"
DRV = f"{PATH}.drv"
INFO = PathInfo(
    path=PATH, nar_hash="00" * 32, nar_size=1, references=(DRV,), signatures=("k:s",), ca="text:x"
)

OURS = [
    operations.is_valid_path(PATH),
    operations.query_valid_paths([PATH, DRV]),
    operations.query_path_info(PATH),
    operations.query_derivation_output_map(DRV),
    operations.add_temp_root(PATH),
    operations.add_indirect_root("/tmp/link"),
    operations.add_to_store("x", AddMethod.TEXT, [PATH], repair=False),
    operations.add_to_store_nar(INFO, repair=False, dont_check_sigs=True),
    operations.add_multiple_to_store(repair=False, dont_check_sigs=True),
    operations.nar_from_path(PATH),
    operations.build_paths_with_results([f"{DRV}!*"], BuildMode.NORMAL, 38),
]


def stream(data: bytes) -> tuple[DaemonStream, Replay]:
    replay = Replay([(0, data)])
    return DaemonStream(Transport(replay)), replay


async def consumed(shape_reader: Decoder[tuple[str, ...]], arguments: bytes) -> tuple[str, ...]:
    """The paths that `arguments` want built; every byte of them and no other must be read."""
    source, _ = stream(arguments + b"the next")
    paths, raw = await source.read(recorded(shape_reader))
    assert raw == arguments
    assert await source.take(8) == b"the next"
    return paths


@pytest.mark.parametrize("operation", OURS, ids=lambda operation: operation.op.name)
async def test_our_own_requests_end_where_they_should(operation: Operation[object]) -> None:
    await consumed(SHAPES[operation.op].read(), operation.arguments)


async def test_what_is_to_be_built_is_named_once_without_outputs() -> None:
    arguments = strings([f"{DRV}!out", f"{DRV}!dev,doc", PATH]) + u64(0)
    for op in (Op.BUILD_PATHS, Op.BUILD_PATHS_WITH_RESULTS):
        assert await consumed(SHAPES[op].read(), arguments) == (DRV, PATH)
    assert await consumed(SHAPES[Op.ENSURE_PATH].read(), string(PATH)) == (PATH,)
    outputs = u64(1) + string("out") + string(PATH) + string("") + string("")
    derivation = outputs + strings([PATH]) + string("x86_64-linux") + string("/bin/sh")
    derivation += strings(["-c", "true"]) + pairs([("name", "x"), ("out", PATH)])
    assert await consumed(SHAPES[Op.BUILD_DERIVATION].read(), string(DRV) + derivation + u64(0)) == (DRV,)


async def test_options_lose_every_way_to_build() -> None:
    asked = DaemonOptions(max_build_jobs=8, extra=(("max-jobs", "8"), ("builders", "ssh://x"), ("a", "b")))
    expected = DaemonOptions(max_build_jobs=0, extra=(("a", "b"), ("builders", "")))
    source, _ = stream(options.encode(asked))
    assert await source.read(read_options_without_building()) == options.encode(expected)


@pytest.mark.parametrize("client", [34, 35, 37, 38, 99])
async def test_the_servers_half_of_the_greeting(client: int) -> None:
    """Against our own client's half, whose other end is real in the recordings."""
    ours, theirs = trio.testing.memory_stream_pair()
    server, peer = DaemonStream(Transport(ours)), DaemonStream(Transport(theirs))
    agreed: list[DaemonInfo] = []

    async def ask() -> None:
        agreed.append(await peer.converse(handshake.greet_daemon(client)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        minor = await server.converse(handshake.greet_client(38))
        info = DaemonInfo(minor, "2.test", True if minor >= 35 else None)
        await server.converse(handshake.introduce(info))
    assert agreed == [info]
    assert minor == min(client, 38)


async def test_a_client_that_waits_for_our_version_gets_it() -> None:
    """Nix 2.8 sends its magic number alone and reads before it says its version."""
    replay = Replay([(0, u64(0x6E697863)), (16, u64(0x122))])
    assert await DaemonStream(Transport(replay)).converse(handshake.greet_client(38)) == 34


async def test_who_is_no_client_is_refused() -> None:
    with pytest.raises(DaemonProtocolError):
        await stream(b"GET / HTTP/1.1\r\n")[0].converse(handshake.greet_client(38))
    with pytest.raises(DaemonTooOld):
        await stream(u64(0x6E697863) + u64(0x121))[0].converse(handshake.greet_client(38))


async def test_recording_passes_errors_on() -> None:
    with pytest.raises(DaemonProtocolError):
        await stream(u64(2**60))[0].read(recorded(read_strings()))
    assert await stream(u64(7))[0].read(recorded(read_u64())) == (7, u64(7))
