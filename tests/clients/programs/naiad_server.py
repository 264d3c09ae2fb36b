"""What the programs of all Python clients need; it runs in their environments and needs no package."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable
from typing import TypeVar

URL = os.environ["NAIAD_URL"]
MODEL = os.environ["NAIAD_MODEL"]
_METRICS = os.environ["NAIAD_METRICS"]
KEY = "none"
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
# Takes minutes unless it is cancelled.
MANY_TOKENS = 7_000
PATIENCE_S = 15

Error = TypeVar("Error", bound=Exception)


def num_unfinished() -> float:
    """Requests that the engine computes or that wait."""
    with urllib.request.urlopen(f"{_METRICS}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}: did not happen within {PATIENCE_S} s"
        time.sleep(0.05)


def expect_running(number: int) -> None:
    """Wait until the engine has so many requests."""
    eventually(lambda: num_unfinished() == number, f"{number} unfinished requests")


def refused(kind: type[Error], ask: Callable[[], object]) -> Error:
    """Return the error of a request that must be refused."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError("the request was accepted")
