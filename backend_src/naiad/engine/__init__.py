"""The engine: takes requests, computes one step at a time and returns outputs."""

from __future__ import annotations

from naiad.engine.build import build_engine
from naiad.engine.engine import Engine

__all__ = ["Engine", "build_engine"]
