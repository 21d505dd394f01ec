"""Both ends of the handshake, driven without a socket."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest

from gradient.wire import messages as m
from gradient.wire.errors import HandshakeRefused
from gradient.wire.handshake import (
    CheckTokens,
    Established,
    FindPeers,
    Send,
    Versions,
    agree,
    server_side,
    worker_side,
)

WORKER = "0d7c7a9e-9a1c-4f43-9d0e-8a6f3a1c2b4d"
ALL = m.Capabilities()
Side = Generator[Any, Any, Established]


def play(side: Side, *answers: Any) -> tuple[list[Any], Established]:
    """Feed `answers` to the steps that want one; the messages sent, and the result."""
    sent, waiting, answer = [], list(answers), None
    while True:
        try:
            step = side.send(answer)
        except StopIteration as done:
            assert waiting == []
            return sent, done.value
        if isinstance(step, Send):
            sent.append(step.message)
            answer = None
        else:
            answer = waiting.pop(0)
            if callable(answer):
                answer = answer(step)


def refused(side: Side, *answers: Any) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as caught:
        play(side, *answers)
    return caught.value


def init(oldest: int = 1, newest: int = 1, worker_id: str = WORKER) -> m.InitConnection:
    return m.InitConnection(oldest, newest, worker_id, m.Capabilities(eval=False))


def test_both_ends_agree() -> None:
    """The two generators played against each other, message by message."""
    tokens = (m.PeerToken("project", "t1"), m.PeerToken("*", "t2"), m.PeerToken("elsewhere", "t3"))
    server = server_side(m.Capabilities(build=False))
    worker = worker_side(WORKER, ALL, tokens, name="host-1")
    checked: dict[str, str] = {}
    to_server: Any = None
    to_worker: Any = None
    results: dict[str, Established] = {}
    worker_step = next(worker)
    server_step = next(server)
    while len(results) < 2:
        try:
            if isinstance(server_step, FindPeers):
                server_step = server.send(("project", "team", "other"))
            elif isinstance(server_step, CheckTokens):
                checked.update(server_step.tokens)
                server_step = server.send({"project": None, "team": "wrong token", "other": None})
            elif isinstance(server_step, Send):
                to_worker = server_step.message
                server_step = server.send(None)
            elif to_server is not None:
                message, to_server = to_server, None
                server_step = server.send(message)
            elif isinstance(worker_step, Send):
                to_server = worker_step.message
                worker_step = worker.send(None)
            else:
                message, to_worker = to_worker, None
                worker_step = worker.send(message)
        except StopIteration as done:
            results["server" if "server" not in results else "worker"] = done.value
            server_step = None
    assert checked == {"project": "t1", "team": "t2", "other": "t2"}
    assert results["server"] == results["worker"]
    assert results["worker"] == Established(
        version=1,
        worker_id=WORKER,
        capabilities=m.Capabilities(build=False),
        authorized_peers=("project", "other"),
        failed_peers=(m.FailedPeer("team", "wrong token"),),
        name="host-1",
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", ""), ("host.example", "host.example"), ("\x1b[31mred\n\0", "[31mred"), ("n" * 99, "n" * 64)],
)
def test_a_name_is_mended_not_refused(name: str, shown: str) -> None:
    hello = m.InitConnection(1, 1, WORKER, ALL, name)
    _, session = play(server_side(ALL), hello, ("p",), m.AuthResponse((m.PeerToken("p", "t"),)), {"p": None})
    assert session.name == shown


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 5), (3, 7), 5),
        ((3, 7), (1, 5), 5),
        ((1, 9), (4, 4), 4),
        ((1, 2), (3, 4), None),
        ((3, 4), (1, 2), None),
        ((1, 1), (5, 2), None),
    ],
)
def test_versions(ours: tuple[int, int], theirs: tuple[int, int], version: int | None) -> None:
    assert agree(Versions(*ours), Versions(*theirs)) == version


def test_no_common_version_names_both_ranges() -> None:
    refusal = refused(server_side(ALL, versions=Versions(2, 3)), init(4, 6))
    assert (refusal.code, refusal.close_code) == (400, 1002)
    assert "speaks 2 to 3, the other 4 to 6" in refusal.reason


def test_a_worker_refuses_a_version_it_does_not_speak() -> None:
    refusal = refused(worker_side(WORKER, ALL, ()), m.AuthChallenge(2, ("p",)))
    assert refusal.close_code == 1002


@pytest.mark.parametrize("worker_id", ["", "worker-1", WORKER + "0"])
def test_the_worker_id_is_a_uuid(worker_id: str) -> None:
    refusal = refused(server_side(ALL), init(worker_id=worker_id))
    assert refusal.code == 400
    assert "UUID" in refusal.reason


def test_the_worker_id_has_one_spelling() -> None:
    def find(step: FindPeers) -> m.Reject:
        assert step == FindPeers(WORKER)
        return m.Reject(496, "connected already")

    refusal = refused(server_side(ALL), init(worker_id="{" + WORKER.upper() + "}"), find)
    assert (refusal.code, refusal.reason, refusal.close_code) == (496, "connected already", 1008)


def test_a_stopping_server_takes_nobody() -> None:
    assert refused(server_side(ALL, accepting=False), init()).code == 403


@pytest.mark.parametrize("message", [m.Draining(), m.AuthResponse(()), m.RequestJobList()])
def test_other_messages_are_out_of_place(message: Any) -> None:
    refusal = refused(server_side(ALL), message)
    assert (refusal.code, refusal.close_code) == (400, 1002)
    assert type(message).__name__ in refusal.reason
    assert refused(server_side(ALL), init(), ("p",), m.Draining()).code == 400
    assert refused(worker_side(WORKER, ALL, ()), m.Draining()).code == 400


@pytest.mark.parametrize(
    ("peers", "verdicts", "reason"),
    [
        ((), {}, "no project has registered this worker"),
        (("p",), {}, "p: the worker has no token for it"),
        (("p", "q"), {"p": "wrong token"}, "p: wrong token; q: the worker has no token for it"),
        (("p",), {"other": None}, "p: the worker has no token for it"),
    ],
)
def test_no_valid_token(peers: Sequence[str], verdicts: dict[str, str | None], reason: str) -> None:
    refusal = refused(server_side(ALL), init(), peers, m.AuthResponse(()), verdicts)
    assert refusal.code == 401
    assert reason in refusal.reason


def test_only_tokens_of_challenged_peers_are_checked_and_sent() -> None:
    def check(step: CheckTokens) -> dict[str, None]:
        assert dict(step.tokens) == {"p": "t"}
        assert "'t'" not in repr(step)
        return {"p": None}

    tokens = (m.PeerToken("p", "t"), m.PeerToken("q", "u"))
    sent, session = play(server_side(ALL), init(), ("p",), m.AuthResponse(tokens), check)
    assert session.capabilities == m.Capabilities(eval=False)
    assert sent == [m.AuthChallenge(1, ("p",)), m.InitAck(m.Capabilities(eval=False), ("p",))]
    sent, _ = play(worker_side(WORKER, ALL, tokens), m.AuthChallenge(1, ("p",)), m.InitAck(ALL, ("p",)))
    assert sent[1] == m.AuthResponse((m.PeerToken("p", "t"),))


@pytest.mark.parametrize("after", [(), (m.AuthChallenge(1, ("p",)),)])
def test_the_worker_is_told_why(after: tuple[Any, ...]) -> None:
    refusal = refused(worker_side(WORKER, ALL, ()), *after, m.Reject(495, "no cache is subscribed"))
    assert (refusal.code, refusal.reason) == (495, "no cache is subscribed")
