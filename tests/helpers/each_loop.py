"""Runs tests on each event loop that the gate may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

ASYNCIO, UVLOOP = "asyncio", "uvloop"
_POLICIES = {ASYNCIO: asyncio.DefaultEventLoopPolicy, UVLOOP: uvloop.EventLoopPolicy}


def run_on_each_loop(metafunc: pytest.Metafunc) -> None:
    """Have a test run once on each loop; its `conftest` needs the fixture `each_loop`."""
    metafunc.parametrize("each_loop", _POLICIES, indirect=True)


# Autouse, so that tests have it that do not name it.
@pytest.fixture(autouse=True)
def each_loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `asyncio.run` makes is the loop of this name."""
    name: str = getattr(request, "param", ASYNCIO)
    asyncio.set_event_loop_policy(_POLICIES[name]())
    yield name
    asyncio.set_event_loop_policy(None)
