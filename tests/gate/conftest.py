"""What runs on an event loop here runs on each one that the gate may run on."""

from __future__ import annotations

import pytest

from helpers.each_loop import each_loop, run_on_each_loop

__all__ = ["each_loop"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.module, "asyncio") and metafunc.definition.path.name != "test_event_loop.py":
        run_on_each_loop(metafunc)
