"""The adapter's side of the protocol: one JSON object a line, requests on stdin, answers on stdout.

Only Python's own library is imported here, because adapters run in environments of other projects.

    {"op": "load", "model": DIR, "threads": N, "max_batch": N, "max_length": N, "kv_tokens": N,
     "options": {…}}
        → {"versions": {package: version}}
    {"op": "run", "prompts": [[id, …], …], "new_tokens": N}
        → {"tokens": [[id, …], …], "seconds": S}
    {"op": "quit"} → {}

An adapter that fails ends with a traceback on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Generates greedily: prompts and the number of new tokens → the new ids of each prompt.
Generate = Callable[[list[list[int]], int], list[list[int]]]
# Gets the same before the clock starts.
Prepare = Callable[[list[list[int]], int], None]


@dataclass(frozen=True)
class Engine:
    """A loaded engine: what generates, and what is done before the time of a pass starts."""

    generate: Generate
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
        elif op == "quit":
            answer = {}
        else:
            raise ValueError(f"{op!r} is not understood here: load, run and quit are, in this order")
        print(json.dumps(answer), file=answers, flush=True)
        if op == "quit":
            return


def _run(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    engine.prepare(prompts, new_tokens)
    start_s = time.perf_counter()
    tokens = engine.generate(prompts, new_tokens)
    return {"tokens": tokens, "seconds": time.perf_counter() - start_s}
