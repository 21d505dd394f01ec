"""The codec: golden frames, every message there and back, and hostile bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradient.model import BuildKind, BuildSpec, DiscoveredDerivation, FlakeJob, OutputPath
from gradient.wire import messages as m
from gradient.wire.codec import FRAME_LIMIT, FRAME_LIMIT_BEFORE_AUTH, decode, encode
from gradient.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError

EVERYTHING = frozenset(m.TAG_OF)

# Written down once: a change here is a change of the protocol.
GOLDEN = {
    "920680": m.Draining(),
    "922b83a464617461c4020a00ad61737369676e6d656e745f696407a66a6f625f6964a16a": m.LogChunk("j", 7, b"\n\0"),
    "921081a46b696e6401": m.RequestJob(m.JobKind.BUILD),
    "923c84a66a6f625f6964a16aa46d6f646501a5706174687392a22f61a22f62a871756572795f696401": m.CacheQuery(
        "j", 1, ("/a", "/b"), m.QueryMode.PULL
    ),
    "920185ac6361706162696c697469657383a56275696c64c2a46576616cc3a56665746368c3a46e616d65a16ea66e657765737401"
    "a66f6c6465737401a9776f726b65725f6964a177": m.InitConnection(1, 1, "w", m.Capabilities(build=False), "n"),
}


@pytest.mark.parametrize(("frame", "message"), GOLDEN.items())
def test_golden_frames(frame: str, message: Any) -> None:
    assert encode(message).hex() == frame
    assert decode(bytes.fromhex(frame), EVERYTHING) == message


def test_a_worker_of_before_there_were_names() -> None:
    frame = (
        "920184ac6361706162696c697469657383a56275696c64c2a46576616cc3a56665746368c3a66e657765737401"
        "a66f6c6465737401a9776f726b65725f6964a177"
    )
    assert decode(bytes.fromhex(frame), EVERYTHING) == m.InitConnection(
        1, 1, "w", m.Capabilities(build=False)
    )


def test_the_order_of_fields_means_nothing() -> None:
    frame = bytes.fromhex("922b83a66a6f625f6964a16aad61737369676e6d656e745f696407a464617461c4020a00")
    assert decode(frame, EVERYTHING) == m.LogChunk("j", 7, b"\n\0")


@pytest.mark.parametrize("cls", m.TAG_OF, ids=lambda cls: cls.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_there_and_back(cls: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(cls).filter(_fits))
    assert repr(decode(encode(message), frozenset({cls}))) == repr(message)  # repr: NaN equals itself


def _fits(message: Any) -> bool:
    """Hypothesis makes integers of any size; a frame holds 64 bits."""
    try:
        encode(message)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(frame: bytes) -> None:
    _decodes_or_is_refused(frame)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(sorted(m.TAGS)),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ),
)
def test_well_formed_nonsense_is_refused(tag: int, body: Any) -> None:
    _decodes_or_is_refused(msgspec.msgpack.encode((tag, body)))


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_mutated_frames_are_refused_or_read(data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(st.sampled_from(SAMPLES))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_is_refused(bytes(frame))


def _decodes_or_is_refused(frame: bytes) -> None:
    try:
        message = decode(frame, EVERYTHING)
    except RemoteProtocolError:
        return
    assert type(message) in EVERYTHING


def derivation(number: int) -> DiscoveredDerivation:
    name = f"{number:032d}-package-{number}"
    return DiscoveredDerivation(
        drv_path=f"/nix/store/{name}.drv",
        outputs=(OutputPath("out", f"/nix/store/{name}"), OutputPath("dev", f"/nix/store/{name}-dev")),
        dependencies=tuple(f"/nix/store/{n:032d}-package-{n}.drv" for n in range(number, number + 6)),
        input_sources=(f"/nix/store/{number:032d}-builder.sh",),
        architecture="x86_64-linux",
        required_features=("kvm",),
        pname="package",
    )


SAMPLES = [
    m.EvalResult("eval:1", 3, derivations=(derivation(1), derivation(2)), warnings=("w",)),
    m.AuthResponse((m.PeerToken("*", "secret"),)),
    m.AssignJob("j", 1, flake=FlakeJob(steps=())),
    m.AssignJob(
        "j", 1, build=BuildSpec(1, "/nix/store/a.drv", BuildKind.BUILD, (), False, 10, 10, "x86_64-linux")
    ),
    m.WorkerMetrics(1.5, 128, None, 2.0, None),
]


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({}, "missing required field"),
        ({"job_id": 1, "assignment_id": 1}, "Expected `str`"),
        ({"job_id": "j", "assignment_id": True}, "Expected `int`"),
        ({"job_id": "j", "assignment_id": "1"}, "Expected `int`"),
        ([], "Expected `object`"),
    ],
)
def test_the_refusal_names_message_and_fault(body: Any, wrong: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"EvaluatingFlake: .*{re.escape(wrong)}"):
        decode(msgspec.msgpack.encode((32, body)), EVERYTHING)


def test_unknown_tags_and_messages_of_the_other_end_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown message tag 99"):
        decode(msgspec.msgpack.encode((99, {})), EVERYTHING)
    with pytest.raises(RemoteProtocolError, match="AbortJob is not allowed here"):
        decode(encode(m.AbortJob("j", "r")), m.FROM_WORKER)
    assert decode(encode(m.AbortJob("j", "r")), m.FROM_SERVER) == m.AbortJob("j", "r")


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="trailing"):
        decode(encode(m.Draining()) + b"\0", EVERYTHING)
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode((6, {}, 1)), EVERYTHING)


def test_unknown_fields_are_ignored_so_that_new_ones_can_come() -> None:
    frame = msgspec.msgpack.encode((16, {"kind": 1, "colour": ["green"]}))
    assert decode(frame, EVERYTHING) == m.RequestJob(m.JobKind.BUILD)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 100_000,  # nested deeper than the stack
        b"\x92\x10\x82\xa1x" + b"\x91" * 100_000,  # the same in a field nobody reads
        b"\x92\x22\x81\xabderivations\xdd\xff\xff\xff\xff",  # four thousand million claimed, none there
        b"\x92\x22\x81\xabderivations\xc6\xff\xff\xff\xff",
        b"\x92\x05\x81\xa6reason\xa1\xff",  # no UTF-8
    ],
)
def test_bombs_are_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame, EVERYTHING)


def test_size_limits() -> None:
    chunk = m.LogChunk("j", 1, b"x" * FRAME_LIMIT_BEFORE_AUTH)
    with pytest.raises(RemoteProtocolError, match="over the limit of 65536"):
        decode(encode(chunk), EVERYTHING, FRAME_LIMIT_BEFORE_AUTH)
    assert decode(encode(chunk), EVERYTHING) == chunk
    with pytest.raises(LocalProtocolError, match=r"LogChunk of 8388645 bytes .* split it"):
        encode(m.LogChunk("j", 1, b"x" * FRAME_LIMIT))
    with pytest.raises(LocalProtocolError, match="str is not a message"):
        encode("hello")  # type: ignore[arg-type]
    assert issubclass(LocalProtocolError, ProtocolError)
    assert issubclass(RemoteProtocolError, ProtocolError)


def test_every_message_has_a_sender_and_a_tag_of_its_own() -> None:
    assert len(m.TAG_OF) == len(m.TAGS)
    assert frozenset(m.TAG_OF) == m.FROM_WORKER | m.FROM_SERVER
    assert {cls for cls in vars(m).values() if attrs.has(cls) and cls.__module__ == m.__name__} - set(
        m.TAG_OF
    ) == {m.Capabilities, m.PeerToken, m.FailedPeer, m.RequiredPath, m.Candidate, m.CandidateScore, m.Report,
          m.CachedPathInfo, m.UploadGrant}  # fmt: skip


def test_tokens_stay_out_of_reprs() -> None:
    assert "secret" not in repr(m.AuthResponse((m.PeerToken("*", "secret"),)))
    assert "secret" not in repr(m.UploadGrant("http://x", "secret"))


def test_the_documented_table_is_the_protocol() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([WS ]+) \|", text, re.M)
    ends = {cls: " ".join("W" * (cls in m.FROM_WORKER) + "S" * (cls in m.FROM_SERVER)) for cls in m.TAG_OF}
    assert rows == [(str(tag), cls.__name__, ends[cls]) for tag, cls in m.TAGS.items()]
