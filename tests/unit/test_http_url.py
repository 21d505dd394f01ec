"""URLs: what is accepted, where it leads, and what never shows."""

from __future__ import annotations

import pytest

from gradient.http.errors import BadUrl
from gradient.http.url import Origin, Url


@pytest.mark.parametrize(
    ("text", "origin", "target", "authority"),
    [
        ("http://a", Origin("http", "a", 80), "/", "a"),
        ("https://a:8443/x/y?q=1&r=%2F#frag", Origin("https", "a", 8443), "/x/y?q=1&r=%2F", "a:8443"),
        ("https://a:443/", Origin("https", "a", 443), "/", "a"),
        ("http://[::1]:3000/ü b", Origin("http", "::1", 3000), "/%C3%BC%20b", "[::1]:3000"),
        ("HTTP://EXAMPLE/", Origin("http", "example", 80), "/", "example"),
    ],
)
def test_parsed(text: str, origin: Origin, target: str, authority: str) -> None:
    url = Url.parse(text)
    assert (url.origin, url.target, url.origin.authority) == (origin, target, authority)


@pytest.mark.parametrize(
    "text",
    ["", "a/b", "ftp://a/", "http:///x", "http://u:secret@a/", "http://a:port/secret", "http://[::1/secret"],
)
def test_refused_without_showing_secrets(text: str) -> None:
    with pytest.raises(BadUrl) as caught:
        Url.parse(text)
    assert "secret" not in str(caught.value)


def test_a_url_shows_its_origin_only() -> None:
    url = Url.parse("https://bucket.example/object?signature=secret")
    assert str(url) == "https://bucket.example"
    assert "secret" not in repr(url)


@pytest.mark.parametrize(
    ("location", "result"),
    [
        ("/z", "http://a:1/z"),
        ("z?q=2", "http://a:1/x/z?q=2"),
        ("//b/z", "http://b/z"),
        ("https://c:2/z", "https://c:2/z"),
    ],
)
def test_redirects(location: str, result: str) -> None:
    assert Url.parse("http://a:1/x/y?q=1").join(location) == Url.parse(result)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://[::1", "javascript:x"])
def test_redirects_that_lead_nowhere(location: str) -> None:
    with pytest.raises(BadUrl):
        Url.parse("http://a/").join(location)
