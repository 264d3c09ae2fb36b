"""Runs tests on each event loop that the gate and the OpenAI server may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}


def run_on_each_loop(metafunc: pytest.Metafunc) -> None:
    """Have a test run once on each loop; its `conftest` needs the fixture `each_loop`."""
    metafunc.fixturenames.append("each_loop")
    metafunc.parametrize("each_loop", POLICIES, indirect=True)


@pytest.fixture
def each_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `asyncio.run` makes is the loop of this name."""
    asyncio.set_event_loop_policy(POLICIES[request.param]())
    yield
    asyncio.set_event_loop_policy(None)
