"""HTTP of a connection, whose errors are told in the API's form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import InvalidURLError
from yarl import URL

from naiad.openai_server.api.errors import APIError

# Neither compressed bodies, which are refused and should be unpacked by nobody, nor lines of access.
_HTTP_OPTIONS: dict[str, Any] = {"access_log": None, "auto_decompress": False}
# aiohttp's messages end with the bytes that it could not read.
_QUOTED = re.compile(r"\n|: (?:bytearray\()?b['\"]")
_NO_URL = "the target is no URL"
_MALFORMED = web.RequestKey("malformed", bool)


class Protocol(web.RequestHandler):
    """What aiohttp makes of a connection, but for its answers to what is no HTTP.

    These never reach a handler or a middleware. aiohttp's own name its version, and are text.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with an error body, and close the connection."""
        super().handle_error(request, status, exc, message)  # writes to the log
        if status >= 500:
            error = APIError(status, "internal error")
        elif isinstance(exc, InvalidURLError):
            error = malformed(_NO_URL)
        else:
            error = malformed(_QUOTED.split(message or "")[0].rstrip(" .:") or "it can not be read")
        answer = web.Response(status=error.status, body=error.body, content_type="application/json")
        answer.headers["Server"] = "naiad"
        answer.force_close()
        return answer


def protocols_of(server: web.Server) -> Callable[[], Protocol]:
    """Return what makes the protocol of a new connection of this server."""
    make = server.request_factory

    def request_of(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        try:
            return make(message, *rest)
        except ValueError:
            # aiohttp looks at the host of a whole URL only here, where nobody would answer the client.
            request = make(message._replace(url=URL("/")), *rest)
            request[_MALFORMED] = True
            return request

    server.request_factory = request_of
    return lambda: Protocol(server, loop=asyncio.get_running_loop(), **_HTTP_OPTIONS)


def check_target(request: web.BaseRequest) -> None:
    """Refuse a request whose target could not be read.

    Raises:
        APIError: it could not.
    """
    if _MALFORMED in request:
        raise malformed(_NO_URL)


def malformed(what: str) -> APIError:
    """The error of a request that is no HTTP."""
    return APIError(400, f"This is no valid HTTP request: {what}.")
