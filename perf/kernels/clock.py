"""Times calls on a device whose cache does not contain their inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# More than the second-level cache of any GPU. Writing it also takes longer than the host needs to launch the
# timed call, so the GPU does not wait for the host between the events.
_FLUSH_BYTES = 1 << 30
_WARM_UP_CALLS = 3
_MOST_S, _FEWEST = 0.5, 7


@dataclass(frozen=True, slots=True)
class Sample:
    """The duration of a call.

    Attributes:
        median_s: median over all calls, each after the cache was overwritten.
        spread: difference between the medians of the two halves, relative to `median_s`.
        queued_s: time per call of back-to-back calls, including their launches by the host; inputs may
            be in the cache.
    """

    median_s: float
    spread: float
    queued_s: float


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        """Allocate the memory that overwrites the cache.

        Args:
            device: a CUDA device, or the CPU, whose cache is not overwritten.
            repeats: maximum number of timed calls; slow calls are timed less often.
        """
        self._is_cuda = device.type == "cuda"
        self._repeats = repeats
        self._flush = torch.empty(_FLUSH_BYTES if self._is_cuda else 0, dtype=torch.uint8, device=device)

    def time(self, run: Callable[[], object]) -> Sample:
        """Time a call many times."""
        for _ in range(_WARM_UP_CALLS):
            run()
        once_s = self._queued_s(run, 1)
        count = min(self._repeats, max(_FEWEST, int(_MOST_S / max(once_s, 1e-9))))
        halves = [self._cold_s(run, max(1, count // 2)) for _ in range(2)]
        median_s = statistics.median(halves[0] + halves[1])
        one, other = map(statistics.median, halves)
        return Sample(median_s, abs(one - other) / median_s, self._queued_s(run, count))

    def _queued_s(self, run: Callable[[], object], count: int) -> float:
        self._wait()
        start_s = time.perf_counter()
        for _ in range(count):
            run()
        self._wait()
        return (time.perf_counter() - start_s) / count

    def _cold_s(self, run: Callable[[], object], count: int) -> list[float]:
        if not self._is_cuda:
            return [self._queued_s(run, 1) for _ in range(count)]
        events = [(_event(), _event()) for _ in range(count)]
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        self._wait()
        return [1e-3 * begin.elapsed_time(end) for begin, end in events]

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
