"""HTTP of a connection, whose errors are told in the API's form."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

from naiad.openai_server.api.errors import APIError

# Neither compressed bodies, which are refused and should be unpacked by nobody, nor lines of access.
_HTTP_OPTIONS: dict[str, Any] = {"access_log": None, "auto_decompress": False}

# aiohttp's messages end with the bytes that it could not read.
_QUOTED = re.compile(r"\n|: bytearray")


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
        what = _QUOTED.split(message or "")[0].rstrip(" .:") or "it can not be read"
        told = "internal error" if status >= 500 else f"This is no valid HTTP request: {what}."
        error = APIError(status, told)
        answer = web.Response(status=status, body=error.body, content_type="application/json")
        answer.headers["Server"] = "naiad"
        answer.force_close()
        return answer


def protocol_of(server: web.Server) -> Protocol:
    """Make the protocol of a new connection of this server."""
    return Protocol(server, loop=asyncio.get_running_loop(), **_HTTP_OPTIONS)
