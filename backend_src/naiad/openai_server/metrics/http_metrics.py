"""The metrics of the HTTP requests themselves, counted by a middleware around all others."""

from __future__ import annotations

import asyncio
import time

from aiohttp import hdrs, web

from naiad.frontend.request_families import DOOR, OPENAI_DOOR, REQUEST_BUCKETS_S
from naiad.openai_server.metrics.text_format import Family, Histograms, Values
from naiad.openai_server.route import BEGAN_S, IS_GONE, Handler

_CLIENT_GONE = 499
# What clients write must not make metrics: every value of a label is a metric of its own.
_OTHER = "other"
_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, *REQUEST_BUCKETS_S]


class HTTPMetrics:
    """Counts requests by route and status, and how long they took; a stream's duration is all of it."""

    def __init__(self) -> None:
        """Start with none."""
        self._requests = Values("naiad_openai_requests_total", "HTTP requests that have ended", "counter")
        self._durations = Histograms(
            "naiad_openai_request_duration_seconds", "Seconds from a request to its whole answer", _BUCKETS_S
        )

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the request when it has been answered, or when its client is gone."""
        begin_s = request[BEGAN_S] = time.monotonic()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = _CLIENT_GONE
            raise
        finally:
            if request.get(IS_GONE):
                status = _CLIENT_GONE
            self._count(request, status, time.monotonic() - begin_s)

    def families(self) -> list[Family]:
        """The families."""
        return [self._requests, self._durations]

    def _count(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        route = _OTHER if resource is None else resource.canonical
        method = request.method if request.method in hdrs.METH_ALL else _OTHER
        self._requests.add({"method": method, "route": route, "status": str(status)})
        self._durations.observe({DOOR: OPENAI_DOOR, "route": route}, seconds)
