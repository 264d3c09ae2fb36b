"""Counts kernels that become ready: each is a stall, so while serving there should be none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CompileCounter:
    """Variants of kernels that this process compiled, or read compiled from triton-lang's cache.

    Attributes:
        num_compiled: since the counter was made.
    """

    def __init__(self) -> None:
        """Begin to count, beside whoever listens already."""
        # Where no kernel runs, triton-lang is not loaded.
        from triton import knobs

        self.num_compiled = 0
        self._next = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._count

    def _count(
        self,
        *,
        key: str,
        repr: str,
        fn: Any,
        compile: Mapping[str, Any],
        is_manual_warmup: bool,
        already_compiled: bool,
    ) -> bool | None:
        self.num_compiled += 1
        if self._next is None:
            return None
        result: bool | None = self._next(
            key=key,
            repr=repr,
            fn=fn,
            compile=compile,
            is_manual_warmup=is_manual_warmup,
            already_compiled=already_compiled,
        )
        return result
