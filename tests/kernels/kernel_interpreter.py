"""Runs kernels in triton-lang's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

Interpret = Callable[..., Any]


@contextmanager
def interpreter() -> Iterator[Interpret]:
    """Yields `interpret(function, *args)`, which returns the call's result from a process that interprets.

    The function must be a module's, because it is looked up there again. Tensors are shared, so what a
    kernel writes to an argument is visible here. Memory from `torch.empty` holds NaN there.
    """
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(os.getpid).result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

    def interpret(function: Callable[..., Any], *args: Any) -> Any:
        return pool.submit(function, *args).result()

    with pool:
        yield interpret


def _begin() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
