"""Starts contestants, checks their tokens and lets them take turns; one that fails is left out."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from perf.common.report import ROOT
from perf.peers.adapter_process import AdapterProcess, Served
from perf.peers.bounds import Bounds
from perf.peers.contestants import Contestant
from perf.peers.environments import BUILD, install, variables
from perf.peers.models import prepare
from perf.peers.shapes import Shape, kv_token_bytes, kv_tokens
from perf.peers.summary import Turn, agreement
from perf.server.open_loop import Arrival

from naiad.config import ModelConfig
from naiad.errors import InternalError, StartupError

_START_PROMPT_TOKENS = 128
_WARM_UP_TOKENS = 2
_FAILURES = (StartupError, InternalError, OSError)
# Contestants are stopped between their turns, so what one does behind its first answers would go on in the
# first of them: Naiad moves its weights into large pages.
SETTLE_S = 5.0

Prompts = list[list[int]]
# Measures what the machine can do for a contestant at this moment.
MeasureBounds = Callable[[Contestant], Bounds]
_Result = TypeVar("_Result")


class Arena:
    """The contestants of one run.

    Attributes:
        failures: name → why it is not measured.
        versions: name → its packages' versions.
        starts: name → for each start the seconds from the start of its process to the first token.
    """

    def __init__(
        self, model_dir: Path, threads: int, shapes: Sequence[Shape], pip_args: str, settle_s: float = 0.0
    ) -> None:
        """Nothing is started yet.

        Args:
            model_dir: the checkpoint.
            threads: of each contestant.
            shapes: what is going to be measured.
            pip_args: further options of pip.
            settle_s: how long each contestant may go on with what it does after its start.
        """
        self._model_dir = model_dir
        self._config = ModelConfig.from_directory(str(model_dir))
        self._threads = threads
        self._shapes = shapes
        self._pip_args = pip_args
        self._settle_s = settle_s
        self._running: dict[Contestant, AdapterProcess] = {}
        self.failures: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.starts: dict[str, list[float]] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def max_length(self) -> int:
        """Maximum prompt + new tokens of a sequence."""
        longest = max(shape.prompt_tokens + shape.new_tokens for shape in self._shapes)
        return max(longest, _START_PROMPT_TOKENS + _WARM_UP_TOKENS)

    @property
    def running(self) -> list[Contestant]:
        """The contestants that take turns."""
        return list(self._running)

    def install(self, who: Sequence[Contestant]) -> list[Contestant]:
        """Install environments and convert the model; return the contestants for which that succeeded."""
        return [each for each in who if self._survives(each, partial(self._prepare, each))]

    def generate(self, each: Contestant, prompts: Prompts, new_tokens: int) -> list[list[int]] | None:
        """Start a contestant, generate and end it; None if it fails. This fills its caches on disk, too."""
        made: list[list[list[int]]] = []

        def start_and_run() -> None:
            with self._started(each) as process:
                made.append(process.run(prompts, new_tokens).tokens)

        return made[0] if self._survives(each, start_and_run) else None

    def check(
        self, who: Sequence[Contestant], prompts: Prompts, expected: Mapping[str, Prompts]
    ) -> dict[str, float]:
        """Compare greedy tokens; return each contestant's share of agreement. Too low a share fails.

        Args:
            who: the contestants.
            prompts: what they continue.
            expected: model format → the tokens in float32.
        """
        shares: dict[str, float] = {}
        for each in who:
            theirs = expected[each.model_format]
            tokens = self.generate(each, prompts, len(theirs[0]))
            if tokens is None:
                continue
            shares[each.name] = round(agreement(tokens, theirs), 3)
            print(f"{each.name}: {shares[each.name]:.0%} of the first tokens are float32's", flush=True)
            if shares[each.name] < each.least_agreement:
                self._drop(each, f"{shares[each.name]:.0%} of its first tokens are float32's, too few")
        return shares

    def time_starts(self, who: Sequence[Contestant], rounds: int) -> None:
        """Start each contestant and end it after its first token, in turns; see `starts`."""
        for number in range(1, rounds + 1):
            for each in who:
                if each.name not in self.failures:
                    self._survives(each, partial(self._start_and_end, each))
            print(f"starts: round {number} of {rounds}", flush=True)

    @contextmanager
    def all_started(self, who: Sequence[Contestant]) -> Iterator[None]:
        """Start the contestants that have not failed, one after another, and pause them."""
        try:
            for each in who:
                if each.name not in self.failures:
                    self._survives(each, partial(self._start, each))
            yield
        finally:
            for process in self._running.values():
                process.close()
            self._running.clear()

    def take_turns(self, shape: Shape, rounds: int, bounds: MeasureBounds) -> dict[str, list[Turn]]:
        """Measure a shape, A B A B; each contestant is warmed up once and gets no prompt twice.

        Two passes make a turn: all first tokens, and all tokens. After long prompts the difference of two
        such passes would say little, so there is one, in which decoding alone is timed. Before and after each
        turn, while every contestant is paused, the bounds are measured.
        """
        turns: dict[str, list[Turn]] = {each.name: [] for each in self._running}
        for each in self.running:
            self._warm_up(each, shape)
        for number in range(1, rounds + 1):
            for each in self.running:
                before = bounds(each)
                made = (self._decode if shape.kind == "context" else self._passes)(each, shape, number)
                if made is not None:
                    turns[each.name].append(Turn(*made, before.mean(bounds(each))))
            print(f"{shape.name}: round {number} of {rounds}", flush=True)
        return {name: made for name, made in turns.items() if len(made) == rounds}

    def serve(self, each: Contestant, arrivals: Sequence[Arrival]) -> Served | None:
        """Let a contestant serve requests as they come; None if it fails, which ends it."""
        return self._turn(each, "serving", lambda process: process.serve(arrivals))

    def memory(self) -> dict[str, dict[str, float]]:
        """Peak resident and present proportional memory of each running contestant, in MiB."""
        return {
            each.name: {
                "peak_rss_mib": round(process.peak_bytes() / 2**20, 1),
                "pss_mib": round(process.share_bytes() / 2**20, 1),
            }
            for each, process in self._running.items()
        }

    def _prepare(self, each: Contestant) -> None:
        if each.is_peer:
            install(each.environment, self._pip_args)
        prepare(self._model_dir, each.model_format, self._pip_args)

    def _start_and_end(self, each: Contestant) -> None:
        with self._started(each) as process:
            process.run(random_prompts(self._config, 1, _START_PROMPT_TOKENS, "start"), 1)
            taken_s = time.perf_counter() - process.start_s
        self.starts.setdefault(each.name, []).append(round(taken_s, 2))

    def _start(self, each: Contestant) -> None:
        process = self._open(each)
        try:
            self.versions[each.name] = process.load(**self._task(each))
            process.run(random_prompts(self._config, 1, _START_PROMPT_TOKENS, "start"), 1)
            time.sleep(self._settle_s)
            process.pause()
        except _FAILURES:
            process.close()
            raise
        self._running[each] = process

    @contextmanager
    def _started(self, each: Contestant) -> Iterator[AdapterProcess]:
        process = self._open(each)
        try:
            self.versions[each.name] = process.load(**self._task(each))
            yield process
        finally:
            process.close()

    def _open(self, each: Contestant) -> AdapterProcess:
        python = install(each.environment, self._pip_args) if each.is_peer else Path(sys.executable)
        script = ROOT / "perf" / "peers" / "adapters" / f"run_{each.adapter}.py"
        log = BUILD / "logs" / f"{each.name.replace(' ', '-')}.log"
        return AdapterProcess([str(python), str(script)], variables(each.environment, self._threads), log)

    def _task(self, each: Contestant) -> Mapping[str, Any]:
        return {
            "model": str(prepare(self._model_dir, each.model_format, self._pip_args)),
            "threads": self._threads,
            "max_batch": max(shape.batch for shape in self._shapes),
            "max_length": self.max_length,
            "kv_tokens": kv_tokens(self._shapes),
            "options": {**each.options, "kv_token_bytes": kv_token_bytes(self._config, each)},
        }

    def _warm_up(self, each: Contestant, shape: Shape) -> None:
        length = _START_PROMPT_TOKENS if shape.kind == "context" else shape.prompt_tokens
        self._pass(each, replace(shape, prompt_tokens=length), 0, min(_WARM_UP_TOKENS, shape.new_tokens))

    def _passes(self, each: Contestant, shape: Shape, number: int) -> tuple[float, float] | None:
        """Seconds until all first tokens and until all tokens, in a pass each; 0 if there is one token."""
        first_s = self._pass(each, shape, 2 * number, 1)
        total_s: float | None = 0.0
        if shape.new_tokens > 1:
            total_s = self._pass(each, shape, 2 * number + 1, shape.new_tokens)
        return None if first_s is None or total_s is None else (first_s, total_s)

    def _decode(self, each: Contestant, shape: Shape, number: int) -> tuple[float, float] | None:
        """As `_passes`, as if all sequences generated all the time after the first tokens; None if never."""
        prompts = random_prompts(self._config, shape.batch, shape.prompt_tokens, number)
        made = self._turn(each, shape.name, lambda process: process.decode(prompts, shape.new_tokens))
        if made is None:
            return None
        if not made.num_tokens:
            print(
                f"{each.name}, {shape.name}: a sequence ended before another had its first token", flush=True
            )
            return None
        num_tokens = shape.batch * (shape.new_tokens - 1)
        return made.first_s, made.first_s + made.seconds * num_tokens / made.num_tokens

    def _pass(self, each: Contestant, shape: Shape, seed: int, new_tokens: int) -> float | None:
        """Seconds of one pass; None if the contestant fails, which ends it."""
        prompts = random_prompts(self._config, shape.batch, shape.prompt_tokens, seed)
        return self._turn(each, shape.name, lambda process: process.run(prompts, new_tokens).seconds)

    def _turn(
        self, each: Contestant, what: str, action: Callable[[AdapterProcess], _Result]
    ) -> _Result | None:
        """Let a contestant do something while all others are paused; None if it fails, which ends it."""
        process = self._running.get(each)
        if process is None:
            return None
        process.resume()
        try:
            return action(process)
        except _FAILURES as error:
            self._drop(each, f"{what}: {error}")
            return None
        finally:
            if each in self._running:
                process.pause()

    def _survives(self, each: Contestant, action: Callable[[], None]) -> bool:
        try:
            action()
        except _FAILURES as error:
            self._drop(each, str(error))
            return False
        return True

    def _drop(self, each: Contestant, reason: str) -> None:
        print(f"{each.name} is left out: {reason}", file=sys.stderr, flush=True)
        self.failures[each.name] = reason
        process = self._running.pop(each, None)
        if process is not None:
            process.close()


def random_prompts(config: ModelConfig, batch: int, length: int, seed: int | str) -> Prompts:
    """Prompts of uniformly drawn ids; the same for the same arguments."""
    draw = random.Random(f"{batch} {length} {seed}")
    return [[draw.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch)]
