"""The adapter's side of the protocol: one JSON object a line, requests on stdin, answers on stdout.

Only Python's own library is imported here, because adapters run in environments of other projects.

    {"op": "load", "model": DIR, "threads": N, "max_batch": N, "max_length": N, "kv_tokens": N,
     "options": {…}}
        → {"versions": {package: version}}
    {"op": "run", "prompts": [[id, …], …], "new_tokens": N}
        → {"tokens": [[id, …], …], "seconds": S}
    {"op": "decode", "prompts": [[id, …], …], "new_tokens": N}
        → {"first_s": S, "num_tokens": N, "seconds": S}
    {"op": "serve", "arrivals": [{"due_s": S, "prompt": [id, …], "new_tokens": N}, …]}
        → {"first_s": [S, …], "last_s": [S, …], "num_tokens": [N, …]}
    {"op": "quit"} → {}

`decode` generates as `run` does, but only the time in which all sequences generate counts: from the step in
which the last of them gets its first token until the first of them ends. `first_s` is the time before.

`serve` begins each request when it is due, whether earlier ones have ended or not. Times count from when a
request was due, so waiting for a running step counts; arrivals come in the order of `due_s`.

An adapter that fails ends with a traceback on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

# Generates greedily: prompts and the number of new tokens → the new ids of each prompt.
Generate = Callable[[list[list[int]], int], list[list[int]]]
# A step may bring nothing, as when results come a step late.
_MAX_EMPTY_STEPS = 10_000
# Ids of requests; an engine's own pass may count from 1.
_numbers = count(1 << 32)
# Gets the same before the clock starts.
Prepare = Callable[[list[list[int]], int], None]


# Generates in steps in which all sequences get a token each: → `time.perf_counter()` after each step.
StepTimes = Callable[[list[list[int]], int], list[float]]


@dataclass(frozen=True)
class Requests:
    """How an engine takes requests while others run.

    Attributes:
        add: queues a greedy request: its number, which is never used again, its prompt and the number of
            new tokens.
        step: computes one step; returns number → how many new tokens that request got.
    """

    add: Callable[[int, list[int], int], None]
    step: Callable[[], dict[int, int]]


@dataclass(frozen=True)
class Engine:
    """A loaded engine.

    Attributes:
        generate: generates for prompts that start together.
        decode: how decoding alone is timed: by requests, which the engine takes while others run, or, if
            it can not, by the times of its steps.
        prepare: is called before the time of a pass starts.
    """

    generate: Generate
    decode: Requests | StepTimes
    prepare: Prepare = lambda prompts, new_tokens: None


@dataclass(frozen=True)
class Load:
    """What an adapter is told when it loads its model.

    Attributes:
        model: directory or file of the model, in the engine's own format.
        threads: number of threads that compute.
        max_batch: maximum number of sequences at the same time.
        max_length: maximum prompt + new tokens of a sequence.
        kv_tokens: how many tokens the KV cache must hold.
        options: options of this engine.
    """

    model: str
    threads: int
    max_batch: int
    max_length: int
    kv_tokens: int
    options: Mapping[str, Any]


def cores(threads: int) -> list[int]:
    """The cores that this many threads are bound to, where an engine binds threads."""
    return sorted(os.sched_getaffinity(0))[:threads]


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of packages."""
    from importlib import metadata

    return {package: metadata.version(package) for package in packages}


def serve(load: Callable[[Load], Engine], packages: Sequence[str]) -> None:
    """Answer requests until `quit` or the end of stdin.

    Args:
        load: loads the model.
        packages: packages whose versions are reported.
    """
    # What libraries print must not get between answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "load":
            engine = load(Load(**request))
            answer: dict[str, Any] = {"versions": versions(packages)}
        elif op == "run" and engine is not None:
            answer = _run(engine, request["prompts"], request["new_tokens"])
        elif op == "decode" and engine is not None:
            answer = _decode(engine, request["prompts"], request["new_tokens"])
        elif op == "serve" and engine is not None and isinstance(engine.decode, Requests):
            answer = _serve_arrivals(engine.decode, request["arrivals"])
        elif op == "quit":
            answer = {}
        else:
            raise ValueError(f"{op!r} is not understood here: load comes first, only some engines serve")
        print(json.dumps(answer), file=answers, flush=True)
        if op == "quit":
            return


class _Steps:
    """The steps of an engine that has requests; one that makes no more tokens is an error."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._num_empty = 0

    def __call__(self) -> dict[int, int]:
        made = self._requests.step()
        self._num_empty = 0 if any(made.values()) else self._num_empty + 1
        if self._num_empty >= _MAX_EMPTY_STEPS:
            raise RuntimeError("the engine has requests and makes no more tokens")
        return made


def _serve_arrivals(requests: Requests, arrivals: list[dict[str, Any]]) -> dict[str, Any]:
    """Begin requests when they are due and compute steps until all have their tokens."""
    numbers = [next(_numbers) for _ in arrivals]
    number_of = {number: index for index, number in enumerate(numbers)}
    first_s, last_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    num_tokens = [0] * len(arrivals)
    num_added = num_open = 0
    step = _Steps(requests)
    start_s = time.perf_counter()
    while num_added < len(arrivals) or num_open:
        now_s = time.perf_counter() - start_s
        while num_added < len(arrivals) and arrivals[num_added]["due_s"] <= now_s:
            arrival = arrivals[num_added]
            requests.add(numbers[num_added], arrival["prompt"], arrival["new_tokens"])
            num_added += 1
            num_open += 1
        if not num_open:
            time.sleep(max(0.0, arrivals[num_added]["due_s"] - now_s))
            continue
        made = step()
        now_s = time.perf_counter() - start_s
        for number, num_new in made.items():
            index = number_of[number]
            if num_new and not num_tokens[index]:
                first_s[index] = now_s - arrivals[index]["due_s"]
            num_tokens[index] += num_new
            if num_new and num_tokens[index] >= arrivals[index]["new_tokens"]:
                last_s[index] = now_s - arrivals[index]["due_s"]
                num_open -= 1
    return {"first_s": first_s, "last_s": last_s, "num_tokens": num_tokens}


def _run(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    engine.prepare(prompts, new_tokens)
    start_s = time.perf_counter()
    tokens = engine.generate(prompts, new_tokens)
    return {"tokens": tokens, "seconds": time.perf_counter() - start_s}


def _decode(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    engine.prepare(prompts, new_tokens)
    if isinstance(engine.decode, Requests):
        return _decode_requests(engine.decode, prompts, new_tokens)
    start_s = time.perf_counter()
    times = engine.decode(prompts, new_tokens)
    return {
        "first_s": times[0] - start_s,
        "num_tokens": len(prompts) * (len(times) - 1),
        "seconds": times[-1] - times[0],
    }


def _decode_requests(requests: Requests, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    numbers = [next(_numbers) for _ in prompts]
    left = dict.fromkeys(numbers, new_tokens)
    first_s: float | None = None
    seconds, num_tokens = 0.0, 0
    step = _Steps(requests)
    start_s = time.perf_counter()
    for number, prompt in zip(numbers, prompts, strict=True):
        requests.add(number, prompt, new_tokens)
    while left:
        all_run = first_s is not None and len(left) == len(prompts)
        made = step()
        now_s = time.perf_counter() - start_s
        if all_run and first_s is not None:
            num_tokens += sum(made.values())
            seconds = now_s - first_s
        for number, num_new in made.items():
            left[number] -= num_new
            if left[number] <= 0:
                del left[number]
        if first_s is None and all(left.get(number, 0) < new_tokens for number in numbers):
            first_s = now_s
    return {"first_s": first_s, "num_tokens": num_tokens, "seconds": seconds}
