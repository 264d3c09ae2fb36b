"""Which loop the gate runs on."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from naiad.gate.event_loop import run


def the_loop() -> asyncio.AbstractEventLoop:
    found: list[asyncio.AbstractEventLoop] = []

    async def look() -> None:
        found.append(asyncio.get_running_loop())

    run(look())
    return found[0]


def test_the_gate_runs_on_uvloop() -> None:
    assert isinstance(the_loop(), uvloop.Loop)


def test_without_uvloop_it_runs_on_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    # So an import of it fails.
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert isinstance(the_loop(), asyncio.SelectorEventLoop)
