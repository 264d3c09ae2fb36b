"""Requests in, one step at a time, outputs out."""

from __future__ import annotations

from naiad.engine.build import build_engine
from naiad.engine.engine import Engine

__all__ = ["Engine", "build_engine"]
