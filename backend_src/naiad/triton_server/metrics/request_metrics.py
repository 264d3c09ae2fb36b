"""Metrics of one model's requests: finish reasons, lengths and latencies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from naiad.engine_process.observations import ObservationBatch
from naiad.frontend.request_families import (
    BETWEEN_TOKENS,
    DOOR,
    END_LABEL,
    ENDS,
    ENDS_DESCRIPTION,
    FATE,
    FIRST_TOKEN,
    REASONS,
    TRITON_DOOR,
    CountedFates,
    HistogramFamily,
    histogram_families,
    values_of,
)
from naiad.outputs import EngineStats

# Time for writing in each round of the housekeeping thread, which also checks on clients. Writing an
# observation is an IPC round trip of 0.15 to 0.3 ms on a busy machine with two cores, and every response
# causes one.
WRITING_S = 0.01
# If more than MANY_GAPS gaps between tokens wait to be written, an output of several tokens adds only one;
# beyond MOST_GAPS the oldest are dropped. Writing one takes a fifth of a millisecond.
MANY_GAPS, MOST_GAPS = 1000, 5000
# The same limit for the other observations; it holds those of some thousand requests.
MOST_OBSERVATIONS = 50_000

Pending = deque[tuple[str, float]]


class MetricFamilyFactory(Protocol):
    """Makes a metric family, as `pb.metric_family` does."""

    def __call__(self, name: str, description: str, kind: str) -> Any:
        """Return the family of this name and kind."""


@dataclass(slots=True)
class _Fates:
    """What is counted elsewhere, its counters by fate, and their values."""

    source: CountedFates
    counters: dict[str, Any]
    written: dict[str, int] = field(default_factory=dict)

    def write(self) -> None:
        """Write what has changed."""
        for fate, count in self.source.counts().items():
            num_new = count - self.written.get(fate, 0)
            if num_new:
                self.counters[fate].increment(num_new)
                self.written[fate] = count


class RequestMetrics:
    """The request metrics of one model to which clients send requests, whichever model owns the engine."""

    def __init__(
        self,
        family: MetricFamilyFactory,
        model: str,
        version: str,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        door: str = TRITON_DOOR,
        fates: Sequence[CountedFates] = (),
    ) -> None:
        """Create the families and their metrics, labelled with the model and the door.

        Args:
            family: makes a metric family.
            model: the model's name.
            version: the model's version.
            max_model_len: upper end of the buckets of lengths, in tokens.
            clock: returns the time in seconds.
            door: the server by which the requests came.
            fates: what else is counted.
        """
        self._clock = clock
        # (histogram, value) pairs still to be written. Gaps between tokens are apart because there may be too
        # many to write them all.
        self._queue: Pending = deque(maxlen=MOST_OBSERVATIONS)
        self._gaps: Pending = deque(maxlen=MOST_GAPS)
        self._family = family
        self._labels = {"model": model, "version": version, DOOR: door}
        self._families: list[Any] = []
        self._histograms = {each.name: self._histogram(each) for each in histogram_families(max_model_len)}
        ends = self._add(ENDS, ENDS_DESCRIPTION, "counter")
        self._ends = {
            reason: ends.Metric(labels=self._labels | {END_LABEL: name}) for reason, name in REASONS.items()
        }

        self._fates = [_Fates(each, self._fate_counters(each)) for each in fates]

    def update(self, _stats: EngineStats, batch: ObservationBatch) -> bool:
        """Write the counters, and observations while there is time; the next call begins with the rest.

        `_stats` is not used: the engine's own metrics belong to the model that owns the engine.

        Returns:
            Whether observations remain.
        """
        for reason in REASONS:
            num_ended = sum(ended.reason is reason for ended in batch.ended)
            if num_ended:
                self._ends[reason].increment(num_ended)
        for each in self._fates:
            each.write()
        for ended in batch.ended:
            if ended.has_begun:
                self._queue += values_of(ended).items()
        self._queue += ((FIRST_TOKEN, seconds) for seconds in batch.first_token_s)
        for each_s, num_tokens in batch.gaps:
            self._gaps += [(BETWEEN_TOKENS, each_s)] * (num_tokens if len(self._gaps) < MANY_GAPS else 1)
        end_s = self._clock() + WRITING_S
        # Each queue gets half of the time, and what the other one leaves.
        self._observe(self._queue, end_s - WRITING_S / 2)
        self._observe(self._gaps, end_s)
        self._observe(self._queue, end_s)
        return bool(self._queue or self._gaps)

    def delete(self) -> None:
        """Remove the metrics from the port; otherwise Triton keeps them after the model is unloaded."""
        self._queue.clear()
        self._gaps.clear()
        self._histograms.clear()
        self._ends.clear()
        self._fates.clear()
        self._families.clear()

    def _fate_counters(self, each: CountedFates) -> dict[str, Any]:
        family = self._add(each.family, each.description, "counter")
        return {fate: family.Metric(labels=self._labels | {FATE: fate}) for fate in each.counts()}

    def _observe(self, pending: Pending, end_s: float) -> None:
        while pending and self._clock() < end_s:
            name, value = pending.popleft()
            self._histograms[name].observe(value)

    def _histogram(self, family: HistogramFamily) -> Any:
        made = self._add(family.name, family.description, "histogram")
        return made.Metric(labels=self._labels | dict(family.labels), buckets=family.buckets)

    def _add(self, name: str, description: str, kind: str) -> Any:
        made = self._family(name, description, kind)
        self._families.append(made)
        return made
