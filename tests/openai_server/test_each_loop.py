"""What the other tests here rely on: each that the conftest names runs on the loop that it says."""

from __future__ import annotations

import asyncio


async def running_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_a_test_runs_on_the_loop_of_its_name(each_loop: str) -> None:
    assert asyncio.run(running_loop()).split(".")[0] == each_loop
