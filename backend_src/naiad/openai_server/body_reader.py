"""Reads the bodies of requests from the network."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import Executor
from typing import TypeVar

from aiohttp import web

from naiad.openai_server.api.bodies import RequestBody, parse_body
from naiad.openai_server.api.errors import APIError

# Larger bodies are parsed outside the event loop, where they hold nobody up.
_LARGE_BYTES = 64 * 1024
# Clients choose the names of unknown fields, but may not make the server remember any number of them.
_MAX_NAME = 80
_MAX_NAMES = 100
_OTHERS = "others"

Body = TypeVar("Body", bound=RequestBody)

logger = logging.getLogger(__name__)


class BodyReader:
    """Reads bodies into their types."""

    def __init__(self, pool: Executor, *, is_lenient: bool) -> None:
        """Set up.

        Args:
            pool: parses large bodies.
            is_lenient: pass over unknown fields, and count them.
        """
        self._pool = pool
        self._is_lenient = is_lenient
        self.passed_over: Counter[str] = Counter()

    async def read(self, request: web.Request, kind: type[Body]) -> Body:
        """Read a request's body.

        Raises:
            APIError: the body is not valid.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        try:
            raw = await request.read()
        except (web.RequestPayloadError, ConnectionResetError) as error:
            raise APIError(400, f"The body does not end as it should: {error}") from None
        if len(raw) < _LARGE_BYTES:
            body, passed_over = parse_body(raw, kind, is_lenient=self._is_lenient)
        else:
            loop = asyncio.get_running_loop()
            body, passed_over = await loop.run_in_executor(
                self._pool, lambda: parse_body(raw, kind, is_lenient=self._is_lenient)
            )
        for name in passed_over:
            self._pass_over(name[:_MAX_NAME])
        return body

    def _pass_over(self, name: str) -> None:
        if name not in self.passed_over:
            if len(self.passed_over) >= _MAX_NAMES:
                name = _OTHERS
            else:
                logger.warning("a request has the unknown field %r; further ones are only counted", name)
        self.passed_over[name] += 1
