"""Grant tokens."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradient.nar.errors import InvalidGrant
from gradient.nar.grants import MAX_TOKEN, Grants

GRANTS = Grants(b"s" * 32)
TOKEN = GRANTS.issue("upload", "job 7", 1000)


@given(st.text(max_size=50), st.text(max_size=50), st.integers(0, 2**40))
def test_a_token_gives_its_subject_back(scope: str, subject: str, expires: int) -> None:
    token = GRANTS.issue(scope, subject, expires)
    assert GRANTS.check(token, scope, expires - 1) == subject
    with pytest.raises(InvalidGrant, match="expired"):
        GRANTS.check(token, scope, expires)


def test_tokens_fit_into_urls_and_headers() -> None:
    assert set(TOKEN) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert len(TOKEN) < 100


def test_a_token_is_for_one_scope_and_one_server() -> None:
    with pytest.raises(InvalidGrant, match="'upload', not for 'download'"):
        GRANTS.check(TOKEN, "download", 1)
    with pytest.raises(InvalidGrant, match="not issued"):
        Grants(b"t" * 32).check(TOKEN, "upload", 1)


@pytest.mark.parametrize("at", range(len(TOKEN)))
def test_no_character_may_change(at: int) -> None:
    other = "A" if TOKEN[at] != "A" else "B"
    with pytest.raises(InvalidGrant, match="not issued"):
        GRANTS.check(TOKEN[:at] + other + TOKEN[at + 1 :], "upload", 1)


@pytest.mark.parametrize(
    "token",
    ["", "A", "=", "é", "\0", "A" * (MAX_TOKEN + 1), TOKEN[:-4], base64.urlsafe_b64encode(b"{}").decode()],
)
def test_nonsense_is_not_issued(token: str) -> None:
    with pytest.raises(InvalidGrant, match="not issued"):
        GRANTS.check(token, "upload", 1)


def test_a_secret_is_long_and_hidden() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Grants(b"short")
    assert "ss" not in repr(GRANTS)
