"""Naiad's metrics on Triton's port: the reference's names and vLLM's, written by one thread.

Triton's custom metrics are not thread-safe, so only the housekeeping thread calls `update`.
Each write is an IPC round trip, so a value that did not change is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from naiad.outputs import EngineStats
from naiad.triton_server.observations import LatencyBatch

FIRST_TOKEN_BUCKETS_S = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
]
INTER_TOKEN_BUCKETS_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]

Read = Callable[[EngineStats], float]

REQUEST_GAUGES: dict[str, Read] = {
    "active": lambda s: s.num_running + s.num_waiting,
    "max": lambda s: s.max_num_seqs,
    "scheduled": lambda s: s.num_running,
    "context": lambda s: s.num_context_seqs,
    "waiting": lambda s: s.num_waiting,
}
BLOCK_GAUGES: dict[str, Read] = {
    "max": lambda s: s.num_blocks,
    "free": lambda s: s.num_blocks - s.num_used_blocks,
    "used": lambda s: s.num_used_blocks,
    "tokens_per": lambda s: s.block_size,
    "fraction": lambda s: s.num_used_blocks / s.num_blocks if s.num_blocks else 0.0,
}
COUNTERS: dict[str, Read] = {
    "vllm:prompt_tokens_total": lambda s: s.total_prompt_tokens,
    "vllm:generation_tokens_total": lambda s: s.total_generation_tokens,
    "vllm:num_preemptions_total": lambda s: s.total_preemptions,
    "vllm:prefix_cache_queries_total": lambda s: s.total_queried_tokens,
    "vllm:prefix_cache_hits_total": lambda s: s.total_hit_tokens,
    "vllm:spec_decode_num_drafts_total": lambda s: s.total_drafts,
    "vllm:spec_decode_num_draft_tokens_total": lambda s: s.total_draft_tokens,
    "vllm:spec_decode_num_accepted_tokens_total": lambda s: sum(s.total_accepted_tokens_at),
    "naiad_draft_failures_total": lambda s: s.total_draft_failures,
}
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class MetricFamilyFactory(Protocol):
    """Makes a metric family (`pb.metric_family`)."""

    def __call__(self, name: str, description: str, kind: str) -> Any:
        """The family of this name and kind."""


@dataclass(slots=True)
class _Written:
    """A metric, where its value comes from, and the value it has."""

    metric: Any
    read: Read
    value: float


class LatencyMetrics:
    """The histograms of one model that clients ask, whoever owns the engine behind it."""

    def __init__(self, family: MetricFamilyFactory, model: str, version: str) -> None:
        """Create the families and their metrics, labelled with the model."""
        labels = {"model": model, "version": version}
        self._families = [
            family("vllm:time_to_first_token_seconds", "Seconds to first token", "histogram"),
            family("vllm:time_per_output_token_seconds", "Seconds per token", "histogram"),
        ]
        first_token, inter_token = self._families
        self._first_token = first_token.Metric(labels=labels, buckets=FIRST_TOKEN_BUCKETS_S)
        self._inter_token = inter_token.Metric(labels=labels, buckets=INTER_TOKEN_BUCKETS_S)

    def update(self, _stats: EngineStats, latencies: LatencyBatch) -> None:
        """Write what came; the engine's own numbers are those of the model that owns it."""
        for seconds in latencies.first_token_s:
            self._first_token.observe(seconds)
        for seconds in latencies.inter_token_s:
            self._inter_token.observe(seconds)

    def delete(self) -> None:
        """Take the metrics off the port."""
        del self._first_token, self._inter_token
        self._families.clear()


class Metrics:
    """All metrics of one `llm` model."""

    def __init__(self, family: MetricFamilyFactory, model: str, version: str) -> None:
        """Create the families and their metrics, labelled with the model."""
        self._family = family
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []
        self._gauges = self._make_gauges("nv_trt_llm_request_metrics", "request_type", REQUEST_GAUGES)
        self._gauges += self._make_gauges(
            "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", BLOCK_GAUGES
        )
        self._counters = [
            _Written(self._add(name, "Tokens", "counter").Metric(labels=self._labels), read, 0)
            for name, read in COUNTERS.items()
        ]
        self._accepted_at = self._add(ACCEPTED_AT, "Accepted draft tokens by their place", "counter")
        self._num_places = 0
        self._latencies = LatencyMetrics(family, model, version)

    def update(self, stats: EngineStats, latencies: LatencyBatch) -> None:
        """Write what changed. A restarted engine counts from zero again; the counters go on."""
        self._add_places(len(stats.total_accepted_tokens_at))
        for gauge in self._gauges:
            value = gauge.read(stats)
            if value != gauge.value:
                gauge.metric.set(value)
                gauge.value = value
        for counter in self._counters:
            total = counter.read(stats)
            if total != counter.value:
                counter.metric.increment(total - counter.value if total > counter.value else total)
                counter.value = total
        self._latencies.update(stats, latencies)

    def delete(self) -> None:
        """Take the metrics off the port; Triton keeps an unloaded model's otherwise."""
        self._latencies.delete()
        self._gauges.clear()
        self._counters.clear()
        del self._accepted_at
        self._families.clear()

    def _add_places(self, num_places: int) -> None:
        """Count the accepted tokens of further places in drafts; the engine knows how many there are."""
        for place in range(self._num_places, num_places):
            metric = self._accepted_at.Metric(labels=self._labels | {"position": str(place)})
            self._counters.append(_Written(metric, partial(_accepted_at, place), 0))
        self._num_places = max(self._num_places, num_places)

    def _make_gauges(self, name: str, label: str, reads: dict[str, Read]) -> list[_Written]:
        made = self._add(name, "State of the engine", "gauge")
        return [
            _Written(made.Metric(labels=self._labels | {label: key}), read, 0) for key, read in reads.items()
        ]

    def _add(self, name: str, description: str, kind: str) -> Any:
        made = self._family(name, description, kind)
        self._families.append(made)
        return made


def _accepted_at(place: int, stats: EngineStats) -> float:
    return stats.total_accepted_tokens_at[place] if place < len(stats.total_accepted_tokens_at) else 0
