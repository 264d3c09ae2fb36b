"""Counts kernel compilations: each one stalls the engine, so there should be none while serving."""

from __future__ import annotations

from typing import Any


class CompileCounter:
    """Counts kernel variants that this process compiled or loaded from triton-lang's cache.

    Attributes:
        num_compiled: number of kernels since the counter was made.
    """

    def __init__(self) -> None:
        """Start counting; a hook that is already installed is still called."""
        # Imported here so that triton-lang is not loaded where no kernel runs.
        from triton import knobs

        self.num_compiled = 0
        self._next = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._count

    def _count(self, **details: Any) -> Any:
        self.num_compiled += 1
        return None if self._next is None else self._next(**details)
