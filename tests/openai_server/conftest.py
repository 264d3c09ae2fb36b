"""Tests of connections run on each event loop that the OpenAI server may run on."""

from __future__ import annotations

import pytest

from helpers.each_loop import each_loop, run_on_each_loop

__all__ = ["each_loop"]

_OF_CONNECTIONS = (
    "test_each_loop.py",
    "test_guard.py",
    "test_large_bodies.py",
    "test_protocol.py",
    "test_slow_connections.py",
    "test_streams.py",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.name in _OF_CONNECTIONS:
        run_on_each_loop(metafunc)
