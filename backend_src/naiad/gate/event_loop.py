"""The event loop that the gate runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run this to its end on uvloop's loop, or on asyncio's own where uvloop can not be imported.

    Most of what the gate does for a part of an answer is what its loop does, and uvloop's does it in C.
    """
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
