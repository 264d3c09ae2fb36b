"""The engine's metrics, as Triton's metrics port has them.

The engines are not asked over their sockets, although this server is a client of them: the totals on
Triton's port go on when an engine's process is replaced, which only the `llm` stub knows; its gauges are
written after its counters; and requests that came through Triton are observed in the stubs alone. One
source also means that both ports always say the same. The price is one HTTP request on this machine for
each scrape. While Triton is down there is no engine either: this server's own metrics are all there is.
"""

from __future__ import annotations

import asyncio

import aiohttp

# Naiad's families on Triton's metrics port; the others are Triton's own and describe its server.
PREFIXES = ("vllm:", "nv_trt_llm_", "nv_llm_", "naiad_")
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class TritonMetrics:
    """Reads Triton's metrics port."""

    def __init__(self, url: str | None) -> None:
        """Set up.

        Args:
            url: the address of the page; None: there is none.
        """
        self._url = url

    async def text(self) -> str | None:
        """Return the page as it is now; None if the port does not answer in time."""
        if self._url is None:
            return None
        try:
            # A connection that stays open would delay the exit of the server that it leads to.
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as session,
                session.get(self._url) as answer,
            ):
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None
