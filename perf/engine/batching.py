"""Measures what batching in flight, paging and chunked prefill are worth: the same requests in five ways.

    python -m perf.engine.batching

The requests arrive as in a recorded trace. Each way gets them at the same times, on an engine with the
same slots. Tokens are forced to the recorded numbers, and prompts are random, so no way has less to do.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

from perf.common.percentile import percentile
from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.server.open_loop import Arrival
from perf.server.traces import Scaling, read_trace, scaled_arrivals

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine import build_engine
from naiad.errors import ConfigError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, SamplingParams

_TRACE = Path(__file__).parents[1] / "data" / "azure_llm_2023_conversation_10min.csv"
_IDLE_S = 0.001
# Of the plot: points of a line, and seconds over which a mean is taken.
_PLOTTED = 40
_MEAN_S = 3.0

Batching = Literal["static", "dynamic", "in flight"]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve.

    Attributes:
        name: for tables and plots.
        batching: static: a batch begins when it is full and ends with its longest request; dynamic: it begins
            with fewer when its oldest request has waited; in flight: requests join and leave at every step.
        is_chunked: whether a prompt may be divided over steps; otherwise a step computes all of it.
        is_paged: whether a sequence holds the blocks that it uses; otherwise room for the longest one.
    """

    name: str
    batching: Batching
    is_chunked: bool = False
    is_paged: bool = False


WAYS = (
    Way("static", "static"),
    Way("dynamic", "dynamic"),
    Way("in flight", "in flight"),
    Way("in flight, paged", "in flight", is_paged=True),
    Way("in flight, paged, chunked", "in flight", is_chunked=True, is_paged=True),
)


class MeasuredEngine(Protocol):
    """The part of an engine that is used."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request."""

    def step(self) -> list[RequestOutput]:
        """Compute one step."""

    def stats(self) -> EngineStats:
        """The gauges now."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has room for.

    Attributes:
        num_slots: sequences at once.
        window_tokens: the longest sequence.
        max_delay_s: how long the oldest request of a dynamic batch waits for others.
    """

    num_slots: int
    window_tokens: int
    max_delay_s: float


@dataclass(slots=True)
class Run:
    """What was seen while requests were served in one way.

    Attributes:
        first_token_s: number of the request → seconds from its arrival to its first token.
        num_tokens: output tokens.
        seconds: from the first arrival to the last token.
        wasted_slot_s, waited_slot_s: slots that stood empty, or were held by ended requests, while others
            waited; and all slots in that time; in seconds.
        used_kv_s, reserved_kv_s: tokens in the KV cache, and tokens that there was room reserved for; each
            times seconds.
        occupancy: ends of steps and of pauses, and how many requests were computed until then.
    """

    first_token_s: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0
    wasted_slot_s: float = 0.0
    waited_slot_s: float = 0.0
    used_kv_s: float = 0.0
    reserved_kv_s: float = 0.0
    occupancy: list[tuple[float, int]] = field(default_factory=list)

    def rest(self, until_s: float) -> None:
        """Note that nothing has been computed since the last step."""
        if self.occupancy and self.occupancy[-1][1] == 0:
            self.occupancy.pop()
        self.occupancy.append((until_s, 0))

    def figures(self, way: Way) -> dict[str, Any]:
        """The row of the table."""
        waits = sorted(self.first_token_s.values())
        return {
            "way": way.name,
            "tokens_per_s": round(self.num_tokens / self.seconds, 1),
            "ttft_p50_s": round(percentile(waits, 50), 3),
            "ttft_p99_s": round(percentile(waits, 99), 3),
            "slots_wasted": round(self.wasted_slot_s / self.waited_slot_s, 3) if self.waited_slot_s else 0.0,
            "kv_wasted": round(1 - self.used_kv_s / self.reserved_kv_s, 3) if self.reserved_kv_s else 0.0,
        }


class Server:
    """Gives an engine requests as one way of batching does, and watches."""

    def __init__(
        self,
        engine: MeasuredEngine,
        way: Way,
        room: Room,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Set up.

        Args:
            engine: has no requests.
            way: how requests are handed over.
            room: the engine's.
            clock: returns seconds.
            sleep: waits so many seconds.
        """
        self._engine = engine
        self._way = way
        self._room = room
        self._clock = clock
        self._sleep = sleep
        self._waiting: deque[tuple[int, Arrival]] = deque()
        # Number of the request → its tokens, prompt and output; those that the engine has.
        self._live: dict[int, int] = {}
        # Slots of the batch that is computed; in flight: those of live requests.
        self._num_held = 0
        self._is_over = False

    def serve(self, arrivals: Sequence[Arrival]) -> Run:
        """Serve all requests, each from its time on."""
        run, coming = Run(), deque(enumerate(arrivals))
        begin_s = last_s = self._clock()
        while coming or self._waiting or self._live:
            now_s = self._clock() - begin_s
            while coming and coming[0][1].due_s <= now_s:
                self._waiting.append(coming.popleft())
            self._is_over = not coming
            self._hand_over(now_s)
            if not self._engine.has_work:
                self._sleep(_IDLE_S)
                rested_s = self._clock()
                self._watch_slots(run, rested_s - last_s)
                run.rest(rested_s - begin_s)
                last_s = rested_s
                continue
            outputs = self._engine.step()
            ended_s = self._clock()
            self._watch(run, ended_s - last_s)
            run.occupancy.append((ended_s - begin_s, len(self._live)))
            last_s = ended_s
            self._take(run, outputs, ended_s - begin_s, arrivals)
        run.seconds = self._clock() - begin_s
        return run

    def _hand_over(self, now_s: float) -> None:
        """Give the engine the requests that may begin now."""
        if self._way.batching == "in flight":
            num_free = self._room.num_slots - len(self._live)
        elif self._live or not self._is_due(now_s):
            return
        else:
            num_free = self._room.num_slots
        for _ in range(min(num_free, len(self._waiting))):
            number, arrival = self._waiting.popleft()
            self._live[number] = len(arrival.prompt_token_ids)
            num_tokens = arrival.num_tokens
            params = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens)
            self._engine.add_request(
                EngineRequest(sequence_id=number, prompt_token_ids=arrival.prompt_token_ids, params=params)
            )
        self._num_held = len(self._live)

    def _is_due(self, now_s: float) -> bool:
        """Whether the next batch begins."""
        if not self._waiting:
            return False
        is_full = len(self._waiting) >= self._room.num_slots or self._is_over
        has_waited = now_s - self._waiting[0][1].due_s >= self._room.max_delay_s
        return is_full or (self._way.batching == "dynamic" and has_waited)

    def _watch(self, run: Run, seconds: float) -> None:
        """Add the step that has just been computed."""
        self._watch_slots(run, seconds)
        run.used_kv_s += sum(self._live.values()) * seconds
        if self._way.is_paged:
            stats = self._engine.stats()
            # The blocks of requests that ended with this step are free already.
            num_reserved = max(stats.num_used_blocks * stats.block_size, sum(self._live.values()))
            run.reserved_kv_s += num_reserved * seconds
        else:
            run.reserved_kv_s += self._num_held * self._room.window_tokens * seconds

    def _watch_slots(self, run: Run, seconds: float) -> None:
        if self._waiting:
            run.wasted_slot_s += (self._room.num_slots - len(self._live)) * seconds
            run.waited_slot_s += self._room.num_slots * seconds

    def _take(
        self, run: Run, outputs: Sequence[RequestOutput], now_s: float, arrivals: Sequence[Arrival]
    ) -> None:
        for output in outputs:
            number = output.sequence_id
            if output.token_ids:
                run.first_token_s.setdefault(number, now_s - arrivals[number].due_s)
                run.num_tokens += len(output.token_ids)
                self._live[number] += len(output.token_ids)
            if output.finish_reason is not None:
                del self._live[number]
        if self._way.batching == "in flight":
            self._num_held = len(self._live)


def main() -> int:
    """Measure, print, plot and write the results."""
    args = _parse()
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)),
        max_num_seqs=args.slots,
        kv_cache_bytes=args.kv_cache_bytes,
        max_model_len=args.window_tokens,
        enable_prefix_caching=False,
        drafter="none",
    )
    scaling = Scaling(args.speed, args.scale, args.scale, 0.0, args.duration_s, args.window_tokens)
    runs: dict[str, Run] = {}
    results = []
    for way in WAYS:
        engine = build_engine(_configured(config, way, args))
        room = _room(engine.stats(), way, args)
        arrivals, _ = scaled_arrivals(read_trace(args.trace), scaling, engine.model_config.vocab_size)
        runs[way.name] = Server(engine, way, room).serve(arrivals)
        results.append({**runs[way.name].figures(way), "slots": room.num_slots, "requests": len(arrivals)})
        del engine
    print_rows(results)
    print("plotted:", save_panels("batching", "The same requests in five ways", _panels(runs)))
    settings = {name: str(value) for name, value in vars(args).items()} | {"trace": args.trace.name}
    print("written:", write_report("batching", settings, results))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--trace", type=Path, default=_TRACE, metavar="FILE", help="of Azure or Mooncake")
    add("--speed", type=float, default=1.0, help="2: arrivals twice as dense as recorded")
    add("--scale", type=float, default=0.1, help="factor of the recorded lengths")
    add("--duration-s", type=float, default=60.0, help="time over which requests arrive")
    add("--window-tokens", type=int, default=512, help="the longest sequence")
    add("--kv-cache-bytes", type=int, default=96 << 20, help="size of the KV cache in every way")
    add("--slots", type=int, default=32, help="sequences at once; without paging as many as surely fit")
    add("--chunk-tokens", type=int, default=128, help="tokens of a step with chunked prefill")
    add("--max-delay-s", type=float, default=0.5, help="how long a dynamic batch waits for others")
    return parser.parse_args()


def _room(stats: EngineStats, way: Way, args: argparse.Namespace) -> Room:
    """What there is room for: the engine always pages, so without paging fewer sequences are let in."""
    num_unpaged = stats.num_blocks * stats.block_size // args.window_tokens
    num_slots = args.slots if way.is_paged else min(args.slots, num_unpaged)
    if not num_slots:
        raise ConfigError("--kv-cache-bytes", args.kv_cache_bytes, f"room for {args.window_tokens} tokens")
    return Room(num_slots, args.window_tokens, args.max_delay_s)


def _configured(config: EngineConfig, way: Way, args: argparse.Namespace) -> EngineConfig:
    # A step that is not chunked has room for a prompt in each slot.
    whole_tokens = args.slots * args.window_tokens
    return replace(config, max_num_batched_tokens=args.chunk_tokens if way.is_chunked else whole_tokens)


def _panels(runs: dict[str, Run]) -> list[Panel]:
    waits = {name: sorted(run.first_token_s.values()) for name, run in runs.items()}
    return [
        Panel(
            "seconds to first token",
            "share of requests",
            {name: shares_below(times, _PLOTTED) for name, times in waits.items()},
        ),
        Panel(
            "seconds",
            "requests that are computed, mean",
            {name: mean_over(run.occupancy, _MEAN_S) for name, run in runs.items()},
        ),
    ]


def shares_below(values: Sequence[float], num_points: int) -> tuple[list[float], list[float]]:
    """The values, in order, at so many shares of all of them at most, and these shares."""
    places = sorted({round(n * (len(values) - 1) / (num_points - 1)) for n in range(num_points)})
    return [values[place] for place in places], [(place + 1) / len(values) for place in places]


def mean_over(steps: Sequence[tuple[float, int]], window_s: float) -> tuple[list[float], list[float]]:
    """Smooth a quantity that changes in steps: its mean over one window of time after another.

    Args:
        steps: (seconds, the value until then), in order; the first one begins at 0.
        window_s: length of a window.

    Returns:
        The middle of each window, and the mean in it.
    """
    end_s = steps[-1][0]
    sums = [0.0] * math.ceil(end_s / window_s)
    for (begin_s, _), (until_s, value) in pairwise([(0.0, 0), *steps]):
        first, last = int(begin_s // window_s), math.ceil(until_s / window_s)
        for window in range(first, last):
            part_s = min(until_s, (window + 1) * window_s) - max(begin_s, window * window_s)
            sums[window] += value * part_s
    middles, means = [], []
    for window, total in enumerate(sums):
        length_s = min(window_s, end_s - window * window_s)
        middles.append(window * window_s + length_s / 2)
        means.append(total / length_s)
    return middles, means


if __name__ == "__main__":
    sys.exit(main())
