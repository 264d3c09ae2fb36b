"""What the other tests here rely on: each runs on the loop that its id says."""

from __future__ import annotations

import asyncio

import pytest


async def running_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


# The fixture is not named, as in the other tests.
def test_a_test_runs_on_the_loop_of_its_id(request: pytest.FixtureRequest) -> None:
    assert asyncio.run(running_loop()).split(".")[0] == request.node.callspec.params["each_loop"]
