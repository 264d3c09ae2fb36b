"""How fast an engine, or anything that generates, is.

Prefill and decode are told apart by two passes: one makes a single token a sequence, the other
all of them; what the second takes longer is decoding. What is made is checked before a speed is
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
from pathlib import Path
from typing import Protocol

import torch

from naiad import __version__
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.errors import InternalError
from naiad.model_runner.device import resolve_device, resolve_dtype
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, FinishReason, SamplingParams

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

_sequence_ids = count(1)


class SteppedEngine(Protocol):
    """What is measured; `naiad.engine.Engine` is one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request."""

    def step(self) -> list[RequestOutput]:
        """Compute one step."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass makes: `batch` sequences that start together, tokens of each."""

    batch: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of one shape of work.

    Attributes:
        batch: sequences that start together.
        prompt_tokens, output_tokens: of each sequence.
        first_token_s: until every sequence has its first token.
        total_s: until every sequence has all of its tokens.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of all sequences over the time to the first tokens."""
        return self.batch * self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first ones over the time after the first ones."""
        return self.batch * (self.output_tokens - 1) / max(self.total_s - self.first_token_s, 1e-6)

    @property
    def output_tokens_per_s(self) -> float:
        """All new tokens over the whole time."""
        return self.batch * self.output_tokens / self.total_s


def load_engine(config: EngineConfig) -> tuple[Engine, str]:
    """The engine and the name of the dtype it computes in.

    Raises:
        StartupError: configuration, checkpoint or machine.
    """
    dtype = str(resolve_dtype(config, resolve_device(config))).removeprefix("torch.")
    return build_engine(config), dtype


def engine_generate(engine: SteppedEngine) -> Generate:
    """Greedy generation by an engine, without an end of text.

    Returns:
        prompts, number of new tokens → the new ids of each prompt. It raises `InternalError`
        if a sequence does not end with exactly that many.
    """

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
    """Every sequence has all of its tokens.

    Raises:
        InternalError: names the number that was made.
    """
    for token_ids in made:
        if len(token_ids) != num_tokens:
            raise InternalError(f"a sequence made {len(token_ids)} tokens instead of {num_tokens}")


def check(generate: Generate, prompts: Prompts, num_tokens: int = 16) -> bool:
    """Whether the first and the last prompt give the same tokens alone and in the batch.

    In float32 they must; in a 16-bit type the order of additions may turn close calls.
    """
    together = generate(prompts, num_tokens)
    return all(generate([prompts[i]], num_tokens)[0] == together[i] for i in (0, -1))


def measure(
    contestants: Mapping[str, Callable[[Prompts, int], object]],
    make_prompts: Callable[[int], Prompts],
    work: Work,
    repeats: int,
) -> dict[str, Timing]:
    """Time contestants on the same work in turns: A B A B, so that they meet the same machine.

    Args:
        contestants: name → what generates; each is warmed up once.
        make_prompts: seed → `work.batch` prompts; no prompt is used twice by a contestant.
        work: what one pass is.
        repeats: the median is taken of each pass.
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
    """A timing with its rates, as it is written to JSON."""
    return {
        **asdict(timing),
        "prefill_tokens_per_s": round(timing.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(timing.decode_tokens_per_s, 1),
        "output_tokens_per_s": round(timing.output_tokens_per_s, 1),
    }


def machine() -> dict[str, str | int]:
    """What a figure depends on besides the code."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "naiad": __version__,
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def sentence(timing: Timing, dtype: str) -> str:
    """A timing for people."""
    return (
        f"batch {timing.batch:>3} {dtype}: decode {timing.decode_tokens_per_s:8.1f} tokens/s, "
        f"prefill {timing.prefill_tokens_per_s:8.1f} tokens/s, "
        f"all {timing.output_tokens_per_s:8.1f} new tokens/s"
    )
