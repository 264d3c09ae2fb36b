"""Adds one to the last token again and again; its option `fault` makes it fail on purpose."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf" / "peers" / "adapters"))

from protocol import Engine, Load, Requests, serve


def load(task: Load) -> Engine:
    fault = task.options.get("fault")
    print("libraries print while they load", flush=True)
    if fault == "load":
        raise OSError(f"{task.model} is not here")

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        if fault == "run":
            raise MemoryError("no room for the cache")
        num_made = new_tokens - (fault == "short")
        return [[prompt[-1] + 1 + number for number in range(num_made)] for prompt in prompts]

    def step_times(prompts: list[list[int]], new_tokens: int) -> list[float]:
        return [time.perf_counter() for _ in generate(prompts, new_tokens)[0]]

    return Engine(generate, step_times if fault == "no requests" else _requests(fault))


def _requests(fault: str | None) -> Requests:
    left: dict[int, int] = {}

    def add(number: int, prompt: list[int], new_tokens: int) -> None:
        left[number] = new_tokens

    def step() -> dict[int, int]:
        if fault == "serve":
            raise MemoryError("no room for the cache")
        if fault == "stuck":
            return {}
        made = dict.fromkeys(list(left)[:1] if fault == "one by one" else left, 1)
        for number in made:
            left[number] -= 1
            if not left[number]:
                del left[number]
        return made

    return Requests(add, step)


if __name__ == "__main__":
    serve(load, ["pytest"])
