"""What the steps of a replica cost as its clients see them, the server around the engine included."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from perf.cluster.replica_spec import ReplicaSpec
from perf.server.load import arrays, llm_inputs, timed_messages
from perf.server.serve_process import Served

_SEQUENCES = (1, 2, 4, 8, 16, 32)
_SHORT_PROMPT = 64
_NUM_TOKENS = 64
_LONG_PROMPT = 1500
_LONG_SEQUENCES = 8
_PROMPTS = (256, 1024, 3072)
_REPEATS = 3

# The times at which tokens came, and how many, for one stream.
Arrivals = list[tuple[float, int]]


def served_costs(server: Served, spec: ReplicaSpec, seed: int) -> ReplicaSpec:
    """Measure a server that has nothing else to do.

    Args:
        server: whose model `llm` is asked.
        spec: its limits.
        seed: of the prompts, which no cache may know.
    """
    rng = np.random.default_rng(seed)

    def streams(num: int, num_prompt_tokens: int, num_tokens: int) -> list[Arrivals]:
        prompts = rng.integers(100, 20_000, (num, num_prompt_tokens)).tolist()
        asked = [llm_inputs(prompt, num_tokens) for prompt in prompts]
        return [
            [(at_s, size) for at_s, message in stream for size in _sizes(message)]
            for stream in timed_messages(server.grpc, "llm", asked)
        ]

    sequences = [num for num in _SEQUENCES if num <= spec.max_num_seqs]
    decode = tuple((num, step_s(streams(num, _SHORT_PROMPT, _NUM_TOKENS))) for num in sequences)
    few = min(_LONG_SEQUENCES, spec.max_num_seqs)
    long_s = step_s(streams(few, _LONG_PROMPT, _NUM_TOKENS))
    longer = few * (_LONG_PROMPT - _SHORT_PROMPT)
    first_s = {
        num: float(np.median([streams(1, num, 1)[0][0][0] for _ in range(_REPEATS)])) for num in _PROMPTS
    }
    token_s, pair_s = prompt_costs(first_s)
    return msgspec.structs.replace(
        spec,
        decode=decode,
        short_context=_SHORT_PROMPT + _NUM_TOKENS // 2,
        context_s=max(0.0, (long_s - dict(decode)[few]) / longer),
        prompt_token_s=token_s,
        pair_s=pair_s,
        overhead_s=0.0,
    )


def step_s(streams: Sequence[Arrivals]) -> float:
    """The mean seconds of a step while all streams get tokens.

    Args:
        streams: when tokens came, and how many, for each.
    """
    begin_s = max(stream[0][0] for stream in streams)
    end_s = min(stream[-1][0] for stream in streams)
    num_tokens = sum(size for stream in streams for at_s, size in stream if begin_s < at_s <= end_s)
    return (end_s - begin_s) * len(streams) / num_tokens


def prompt_costs(first_s: dict[int, float]) -> tuple[float, float]:
    """Fit seconds a token, and seconds a pair of tokens, to the first tokens of prompts.

    Args:
        first_s: tokens of a prompt → seconds until its first token.

    Returns:
        Both, by least squares of relative errors, at least 1e-9 and 0.
    """
    sizes = np.array(list(first_s), dtype=np.float64)
    seconds = np.array(list(first_s.values()))
    terms = np.stack([sizes, sizes * sizes / 2], axis=1) / seconds[:, None]
    token_s, pair_s = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    if pair_s < 0:
        token_s, pair_s = float(np.mean(seconds / sizes)), 0.0
    return max(1e-9, float(token_s)), float(pair_s)


def mean_costs(one: ReplicaSpec, other: ReplicaSpec) -> ReplicaSpec:
    """The costs half-way between two measurements of one replica."""
    decode = tuple(
        (num, (one_s + other_s) / 2)
        for (num, one_s), (_, other_s) in zip(one.decode, other.decode, strict=True)
    )
    means = {
        name: (getattr(one, name) + getattr(other, name)) / 2
        for name in ("context_s", "prompt_token_s", "pair_s", "overhead_s")
    }
    return msgspec.structs.replace(one, decode=decode, **means)


def _sizes(message: bytes) -> list[int]:
    return [ids.size for ids in arrays([message], "output_ids") if ids.size]
