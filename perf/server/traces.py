"""Recorded request arrivals and lengths, scaled to what a small server can serve."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from perf.server.open_loop import Arrival

from naiad.errors import ConfigError

_BLOCK_TOKENS = 512
_AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
# The special tokens of most vocabularies are below this id.
_FIRST_PLAIN_ID = 1000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as it was recorded.

    Attributes:
        due_s: seconds after the trace's first request.
        prompt_tokens, output_tokens: lengths.
        block_ids: one for each 512 tokens of the prompt, equal for equal prefixes; () = not recorded.
    """

    due_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is replayed.

    Attributes:
        speed: 2 = arrivals twice as dense.
        prompt_scale, output_scale: factors of the lengths; at least one token remains.
        start_s: start of the replayed part of the trace.
        duration_s: time over which the replayed requests arrive.
        window_tokens: maximum length of prompt and output together.
    """

    speed: float
    prompt_scale: float
    output_scale: float
    start_s: float
    duration_s: float
    window_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace of Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake (JSON lines).

    Raises:
        ConfigError: it is neither, empty, or damaged; names the line.
    """
    if not path.is_file():
        raise ConfigError("--trace", str(path), "a file")
    read = _read_mooncake if path.suffix == ".jsonl" else _read_azure
    requests = read(path)
    if not requests:
        raise ConfigError("--trace", str(path), "at least one request")
    first_s = min(request.due_s for request in requests)
    return [
        TraceRequest(each.due_s - first_s, each.prompt_tokens, each.output_tokens, each.block_ids)
        for each in requests
    ]


def scaled_arrivals(
    trace: Sequence[TraceRequest], scaling: Scaling, vocab_size: int
) -> tuple[list[Arrival], int]:
    """Convert a part of a trace to requests; also return how many were clipped to the window.

    Prefixes that are equal in the trace are equal here. All tokens are random and differ between speeds,
    so that no run finds the prompts of an earlier one in a cache.
    """
    arrivals = []
    num_clipped = 0
    for number, request in enumerate(trace):
        due_s = (request.due_s - scaling.start_s) / scaling.speed
        if not 0 <= due_s < scaling.duration_s:
            continue
        num_prompt, num_output = _scaled_lengths(request, scaling)
        num_clipped += num_prompt + num_output > scaling.window_tokens
        num_output = min(num_output, scaling.window_tokens - 1)
        num_prompt = min(num_prompt, scaling.window_tokens - num_output)
        arrivals.append(Arrival(due_s, _prompt(request, number, num_prompt, scaling, vocab_size), num_output))
    return arrivals, num_clipped


def _scaled_lengths(request: TraceRequest, scaling: Scaling) -> tuple[int, int]:
    num_prompt = max(1, round(request.prompt_tokens * scaling.prompt_scale))
    return num_prompt, max(1, round(request.output_tokens * scaling.output_scale))


def _prompt(
    request: TraceRequest, number: int, num_tokens: int, scaling: Scaling, vocab_size: int
) -> list[int]:
    seeds = request.block_ids or (f"request {number}",)
    block_tokens = _BLOCK_TOKENS * scaling.prompt_scale if request.block_ids else num_tokens
    prompt: list[int] = []
    for index, seed in enumerate(seeds):
        num_new = min(round((index + 1) * block_tokens), num_tokens) - len(prompt)
        draw = random.Random(f"{scaling.speed} {seed}")
        prompt += [draw.randrange(_FIRST_PLAIN_ID, vocab_size) for _ in range(num_new)]
    return prompt


def _read_azure(path: Path) -> list[TraceRequest]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not _AZURE_COLUMNS.issubset(reader.fieldnames or ()):
            raise ConfigError("--trace", str(path), f"the columns {', '.join(sorted(_AZURE_COLUMNS))}")
        requests = []
        for row in reader:
            try:
                # Python reads six digits of a second's fraction; the trace has seven.
                due = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (TypeError, ValueError):
                raise _damaged(path, reader.line_num) from None
            requests.append(TraceRequest(due.timestamp(), *lengths))
    return requests


def _read_mooncake(path: Path) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            requests.append(
                TraceRequest(
                    row["timestamp"] / 1000,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(row["hash_ids"]),
                )
            )
        except (TypeError, ValueError, KeyError):
            raise _damaged(path, number) from None
    return requests


def _damaged(path: Path, number: int) -> ConfigError:
    return ConfigError("--trace", f"{path} line {number}", "a request of an Azure or Mooncake trace")
