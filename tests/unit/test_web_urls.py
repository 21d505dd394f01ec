"""Addresses as clients are told them."""

from __future__ import annotations

import pytest

from gradient.web.site import Urls

LISTENING = Urls("http://127.0.0.1:3000", "ws://127.0.0.1:3001/proto")


@pytest.mark.parametrize(
    ("host", "http", "proto"),
    [
        ("ci.lan:3000", "http://ci.lan:3000", "ws://ci.lan:3001/proto"),
        ("ci.lan", "http://ci.lan", "ws://ci.lan:3001/proto"),
        ("[fd00::1]:3000", "http://[fd00::1]:3000", "ws://[fd00::1]:3001/proto"),
        (None, LISTENING.http, LISTENING.proto),
        ("evil/../x", LISTENING.http, LISTENING.proto),
        ("a b", LISTENING.http, LISTENING.proto),
    ],
)
def test_a_client_is_told_the_host_it_came_by(host: str | None, http: str, proto: str) -> None:
    seen = LISTENING.seen_by(host)
    assert (seen.http, seen.proto) == (http, proto)


def test_a_public_address_is_the_same_for_everybody() -> None:
    public = Urls.public("https://ci.example.org/")
    assert public.seen_by("10.0.0.1:3000") == public
    assert (public.http, public.proto) == ("https://ci.example.org", "wss://ci.example.org/proto")
