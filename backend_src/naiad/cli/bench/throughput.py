"""Measures the throughput of an engine, or of anything else that generates tokens.

Prefill and decode are separated by two passes: the first generates one token per sequence, the
second all of them; the difference is the time of decoding. The tokens are checked before a speed is
reported.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import count
from typing import Protocol

import torch

from naiad import __version__
from naiad.config import EngineConfig
from naiad.config.cores import num_compute_threads
from naiad.engine import Engine, build_engine
from naiad.errors import InternalError
from naiad.model_runner.device import resolve_device, resolve_dtype
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, FinishReason, SamplingParams
from naiad_kernels.native.variants import cpu_model

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

_sequence_ids = count(1)


class SteppedEngine(Protocol):
    """An engine that can be measured, such as `naiad.engine.Engine`."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request."""

    def step(self) -> list[RequestOutput]:
        """Compute one step."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one pass: `batch` sequences that start together, and the tokens of each."""

    batch: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Median times of one kind of work.

    Attributes:
        batch: number of sequences that start together.
        prompt_tokens, output_tokens: number of tokens of each sequence.
        first_token_s: time until every sequence has its first token.
        total_s: time until every sequence has all of its tokens.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of all sequences, divided by the time to the first tokens."""
        return self.batch * self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens after the first of each sequence, divided by the time that they take."""
        return self.batch * (self.output_tokens - 1) / max(self.total_s - self.first_token_s, 1e-6)

    @property
    def output_tokens_per_s(self) -> float:
        """All output tokens, divided by the total time."""
        return self.batch * self.output_tokens / self.total_s


def load_engine(config: EngineConfig) -> tuple[Engine, str]:
    """Build an engine; return it and the name of the dtype it computes in.

    Raises:
        StartupError: the configuration, the checkpoint or the machine is not suitable.
    """
    dtype = str(resolve_dtype(config, resolve_device(config))).removeprefix("torch.")
    return build_engine(config), dtype


def engine_generate(engine: SteppedEngine) -> Generate:
    """Make a function that generates greedily with an engine and ignores the end of text.

    Returns:
        A function of the prompts and the number of new tokens that returns the new ids of each
        prompt. It raises `InternalError` if a sequence ends with another number of tokens.
    """

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_tokens)
        made: dict[int, list[int]] = {}
        for prompt in prompts:
            sequence_id = next(_sequence_ids)
            made[sequence_id] = []
            engine.add_request(EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params))
        while engine.has_work:
            for output in engine.step():
                made[output.sequence_id] += output.token_ids
                if output.finish_reason is FinishReason.ERROR:
                    raise InternalError(output.error_message)
        check_counts(list(made.values()), num_tokens)
        return list(made.values())

    return generate


def check_counts(made: list[list[int]], num_tokens: int) -> None:
    """Check that every sequence has all of its tokens.

    Raises:
        InternalError: a sequence has another number of tokens.
    """
    for token_ids in made:
        if len(token_ids) != num_tokens:
            raise InternalError(f"a sequence made {len(token_ids)} tokens instead of {num_tokens}")


def check(generate: Generate, prompts: Prompts, num_tokens: int = 16) -> bool:
    """Whether the first and the last prompt give the same tokens alone and in the batch.

    In float32 they must be equal; in a 16-bit type the order of additions may decide a near tie.
    """
    together = generate(prompts, num_tokens)
    return all(generate([prompts[i]], num_tokens)[0] == together[i] for i in (0, -1))


def measure(
    contestants: Mapping[str, Callable[[Prompts, int], object]],
    make_prompts: Callable[[int], Prompts],
    work: Work,
    repeats: int,
) -> dict[str, Timing]:
    """Time contestants in turns (A B A B) on the same work, so that the machine's state affects all alike.

    Args:
        contestants: a generating function for each name; each is warmed up once.
        make_prompts: returns `work.batch` prompts for a seed; no contestant gets a prompt twice.
        work: the work of one pass.
        repeats: number of turns, of which the median is returned.
    """

    def seconds(generate: Callable[[Prompts, int], object], seed: int, num_tokens: int) -> float:
        prompts = make_prompts(seed)
        start_s = time.perf_counter()
        generate(prompts, num_tokens)
        return time.perf_counter() - start_s

    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for generate in contestants.values():
        seconds(generate, 0, 2)
    for turn in range(1, repeats + 1):
        for name, generate in contestants.items():
            first_s = seconds(generate, 2 * turn, 1)
            passes[name].append((first_s, seconds(generate, 2 * turn + 1, work.output_tokens)))
    return {name: _median(work, times) for name, times in passes.items()}


def _median(work: Work, passes: list[tuple[float, float]]) -> Timing:
    first_s, total_s = (statistics.median(times) for times in zip(*passes, strict=True))
    return Timing(work.batch, work.prompt_tokens, work.output_tokens, round(first_s, 6), round(total_s, 6))


def random_prompts(work: Work, vocab_size: int, seed: int) -> Prompts:
    """Prompts of ids drawn uniformly from [0, vocab_size); the same for the same arguments."""
    draw = random.Random(f"{work.batch} {seed}")
    return [[draw.randrange(vocab_size) for _ in range(work.prompt_tokens)] for _ in range(work.batch)]


def figures(timing: Timing) -> dict[str, float]:
    """A timing and its rates, for JSON."""
    return {
        **asdict(timing),
        "prefill_tokens_per_s": round(timing.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(timing.decode_tokens_per_s, 1),
        "output_tokens_per_s": round(timing.output_tokens_per_s, 1),
    }


def machine() -> dict[str, str | int]:
    """The properties of the machine and the software that the measured figures depend on."""
    return {
        "cpu": cpu_model() or platform.machine(),
        "threads": num_compute_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "naiad": __version__,
    }


def sentence(timing: Timing, dtype: str) -> str:
    """A timing as a line of text."""
    return (
        f"batch {timing.batch:>3} {dtype}: decode {timing.decode_tokens_per_s:8.1f} tokens/s, "
        f"prefill {timing.prefill_tokens_per_s:8.1f} tokens/s, "
        f"all {timing.output_tokens_per_s:8.1f} new tokens/s"
    )
