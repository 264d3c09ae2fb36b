"""What runs on an event loop here runs on each one that the gate may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # `run` is that of `helpers.http2_wire` where a file has no other use for a loop.
    has_loop = not {"asyncio", "run"}.isdisjoint(vars(metafunc.module))
    if has_loop and metafunc.definition.path.name != "test_event_loop.py":
        metafunc.parametrize("each_loop", POLICIES, indirect=True)


# Autouse, so that tests have it that do not name it.
@pytest.fixture(autouse=True)
def each_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    asyncio.set_event_loop_policy(POLICIES[getattr(request, "param", "asyncio")]())
    yield
    asyncio.set_event_loop_policy(None)
