"""The Quart application: every route, and errors as answers. Layer: web."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, Final

import structlog
from quart import Response, render_template, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from gradient.graph.pg_errors import GraphError
from gradient.web import api, build_actions, cache, events, logs, pages, status
from gradient.web.answers import HTML, json_answer, text_answer
from gradient.web.connection import BoundedRequest, Connection, NoWebSocket
from gradient.web.errors import UNAVAILABLE, WebError
from gradient.web.site import Site

log = structlog.get_logger()

ROUTES: Final = (
    *api.ROUTES,
    *build_actions.ROUTES,
    *cache.ROUTES,
    *events.ROUTES,
    *logs.ROUTES,
    *pages.ROUTES,
    *status.ROUTES,
)


class App(QuartTrio):
    """The application of one site."""

    asgi_http_class = Connection
    asgi_websocket_class = NoWebSocket  # type: ignore[assignment]
    request_class = BoundedRequest

    def __init__(self, site: Site) -> None:
        super().__init__("gradient.web", static_folder=None)
        self.site = site
        # A path is what it is: no redirects to a tidier one, which only costs `nix` a request.
        self.url_map.strict_slashes = False
        self.url_map.merge_slashes = False
        # An answer may take as long as its client needs; the drain ends it.
        self.config["RESPONSE_TIMEOUT"] = None

    def log_exception(
        self,
        exception_info: tuple[type, BaseException, TracebackType] | tuple[None, None, None],
    ) -> None:
        """A handler failed: that is a bug of ours, and the request's path is all that is told of it."""
        log.error("request failed", method=request.method, path=request.path, exc_info=exception_info[1])


def make_app(site: Site) -> App:
    """The application; serve it with `serve_http`."""
    app = App(site)
    for route in ROUTES:
        app.add_url_rule(route.rule, route.name, partial(route.handler, site), methods=[route.method])
    app.register_error_handler(WebError, _web_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(GraphError, _graph_error)
    for kind in UNAVAILABLE:
        app.register_error_handler(kind, _unavailable)
    return app


async def _web_error(error: Any) -> Response:
    response = await _error(error.status, str(error))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _http_error(error: Any) -> Response:
    """Werkzeug's own: no such route, a method it does not take, a crash of a handler."""
    return await _error(error.code or 500, str(error.name).lower())


async def _graph_error(error: Exception) -> Response:
    return await _error(400, str(error))


async def _unavailable(error: Exception) -> Response:
    log.warning("request not served", path=request.path, error=str(error))
    return await _error(503, "the server cannot answer now: try again in a moment")


async def _error(code: int, message: str) -> Response:
    """In the form that the asker reads: JSON for the API, a line for `nix`, a page for a person."""
    line = _one_line(message)
    if request.path.startswith("/cache/"):
        return text_answer(line + "\n", code)
    if request.path.startswith("/api/") or request.path == "/health":
        return json_answer({"error": line}, code)
    return text_answer(await render_template("error.html", message=line), code, HTML)


def _one_line(message: str) -> str:
    """It may quote what a stranger sent: a line break, a terminal's escape, half of a surrogate pair."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
