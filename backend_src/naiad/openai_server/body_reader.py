"""Reads the bodies of requests from the network."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

from aiohttp import HttpVersion11, web

from naiad.openai_server.api.bodies import RequestBody, parse_body
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.large_bodies import LARGE_BYTES, HeldBody, LargeBodies, NoRoomError
from naiad.openai_server.route import CONTINUE

# Larger bodies are parsed outside the event loop, where they hold nobody up.
_SMALL_BYTES = 64 * 1024
_NUM_BYTES = web.RequestKey("num_bytes", int)
# Clients choose the names of unknown fields, but may not make the server remember any number of them.
_MAX_NAME = 80
_MAX_NAMES = 100
_OTHERS = "others"
_PATIENCE_S = 120.0
_RETRY_S = "2"
_CONTINUE_LINE = b"HTTP/1.1 100 Continue\r\n\r\n"

Body = TypeVar("Body", bound=RequestBody)

logger = logging.getLogger(__name__)


class BodyReader:
    """Reads bodies into their types."""

    def __init__(self, pool: Executor, *, is_lenient: bool, patience_s: float = _PATIENCE_S) -> None:
        """Set up.

        Args:
            pool: parses large bodies.
            is_lenient: pass over unknown fields, and count them.
            patience_s: how long a body may take to come.
        """
        self._patience_s = patience_s
        self._pool = pool
        self._is_lenient = is_lenient
        self._large = LargeBodies()
        self.passed_over: Counter[str] = Counter()

    async def read(self, request: web.Request, kind: type[Body]) -> Body:
        """Read a request's body.

        Raises:
            APIError: the body is not valid.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        if request.headers.get("Expect", "").lower() == CONTINUE and request.version >= HttpVersion11:
            await request.writer.write(_CONTINUE_LINE)
            # What is counted is the answer.
            request.writer.output_size = 0
        with self._large.room() as held:
            await self._receive(request, held)
            request[_NUM_BYTES] = len(held.data)
            if len(held.data) < _SMALL_BYTES:
                body, passed_over = parse_body(held.data, kind, is_lenient=self._is_lenient)
            else:
                parse = partial(parse_body, held.data, kind, is_lenient=self._is_lenient)
                async with self.turn(request):
                    body, passed_over = await asyncio.get_running_loop().run_in_executor(self._pool, parse)
                # Nobody keeps it but `held`.
                del parse
        for name in passed_over:
            self._pass_over(name[:_MAX_NAME])
        return body

    async def _receive(self, request: web.Request, held: HeldBody) -> None:
        """Read a body.

        Raises:
            APIError: it does not come, or there is no room for it.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        try:
            await asyncio.wait_for(self._read_to_end(request, held), self._patience_s)
        except asyncio.TimeoutError:
            message = f"The body did not come within {self._patience_s:g} s."
            raise APIError(408, message, headers={"Connection": "close"}) from None
        except (web.RequestPayloadError, ConnectionResetError) as error:
            raise APIError(400, f"The body does not end as it should: {error}") from None
        except NoRoomError:
            message = "Too many large requests come at the same time."
            raise APIError(503, message, headers={"Connection": "close", "Retry-After": _RETRY_S}) from None

    def turn(self, request: web.Request) -> AbstractAsyncContextManager[None]:
        """The time in which what a body asks for may be worked out, such as the tokens of its prompt.

        Large bodies take turns; others need not wait.
        """
        return self._large.turn() if request[_NUM_BYTES] >= LARGE_BYTES else nullcontext()

    async def _read_to_end(self, request: web.Request, held: HeldBody) -> None:
        """Read a body as it comes; one that is large no faster than all of them may come.

        Raises:
            web.HTTPRequestEntityTooLarge: it is too large.
            NoRoomError: too much of other bodies is held.
        """
        while chunk := await request.content.readany():
            held.add(chunk)
            if len(held.data) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(held.data))
            if len(held.data) >= LARGE_BYTES:
                await self._large.pace(len(chunk))

    def _pass_over(self, name: str) -> None:
        if name not in self.passed_over:
            if len(self.passed_over) >= _MAX_NAMES:
                name = _OTHERS
            else:
                logger.warning("a request has the unknown field %r; further ones are only counted", name)
        self.passed_over[name] += 1
