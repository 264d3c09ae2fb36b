"""Naiad's metrics on Triton's port: the reference's names and vLLM's, written by one thread.

Triton's custom metrics are not thread-safe, so only the housekeeping thread calls `update`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from naiad.outputs import EngineStats
from naiad.triton_server.observations import LatencyBatch

FIRST_TOKEN_BUCKETS_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
INTER_TOKEN_BUCKETS_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]

REQUEST_GAUGES: dict[str, Callable[[EngineStats], float]] = {
    "active": lambda s: s.num_running + s.num_waiting,
    "max": lambda s: s.max_num_seqs,
    "scheduled": lambda s: s.num_running,
    "context": lambda s: s.num_context_seqs,
    "waiting": lambda s: s.num_waiting,
}
BLOCK_GAUGES: dict[str, Callable[[EngineStats], float]] = {
    "max": lambda s: s.num_blocks,
    "free": lambda s: s.num_blocks - s.num_used_blocks,
    "used": lambda s: s.num_used_blocks,
    "tokens_per": lambda s: s.block_size,
    "fraction": lambda s: s.num_used_blocks / s.num_blocks if s.num_blocks else 0.0,
}
COUNTERS: dict[str, Callable[[EngineStats], int]] = {
    "vllm:prompt_tokens_total": lambda s: s.total_prompt_tokens,
    "vllm:generation_tokens_total": lambda s: s.total_generation_tokens,
}


class MetricFamilyFactory(Protocol):
    """Makes a metric family (`pb.metric_family`)."""

    def __call__(self, name: str, description: str, kind: str) -> Any:
        """The family of this name and kind."""


class Metrics:
    """All metrics of one `llm` model."""

    def __init__(self, family: MetricFamilyFactory, model: str, version: str) -> None:
        """Create the families and their metrics, labelled with the model."""
        labels = {"model": model, "version": version}
        requests = family("nv_trt_llm_request_metrics", "Requests in the engine", "gauge")
        blocks = family("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks", "gauge")
        self._families = [requests, blocks]
        self._gauges = [
            (requests.Metric(labels=labels | {"request_type": key}), read) for key, read in REQUEST_GAUGES.items()
        ] + [
            (blocks.Metric(labels=labels | {"kv_cache_block_type": key}), read) for key, read in BLOCK_GAUGES.items()
        ]
        self._counters = [[self._add(family, name, "Tokens", "counter").Metric(labels=labels), read, 0] for name, read in COUNTERS.items()]
        self._first_token = self._add(
            family, "vllm:time_to_first_token_seconds", "Time to first token in seconds", "histogram"
        ).Metric(labels=labels, buckets=FIRST_TOKEN_BUCKETS_S)
        self._inter_token = self._add(
            family, "vllm:time_per_output_token_seconds", "Time per output token in seconds", "histogram"
        ).Metric(labels=labels, buckets=INTER_TOKEN_BUCKETS_S)

    def update(self, stats: EngineStats, latencies: LatencyBatch) -> None:
        """Write what is true now. A restarted engine counts from zero again; the counters go on."""
        for gauge, read in self._gauges:
            gauge.set(read(stats))
        for entry in self._counters:
            counter, read_total, seen = entry
            total = read_total(stats)
            counter.increment(total - seen if total >= seen else total)
            entry[2] = total
        for seconds in latencies.first_token_s:
            self._first_token.observe(seconds)
        for seconds in latencies.inter_token_s:
            self._inter_token.observe(seconds)

    def delete(self) -> None:
        """Take the metrics off the port; Triton keeps an unloaded model's otherwise."""
        self._gauges.clear()
        self._counters.clear()
        del self._first_token, self._inter_token
        self._families.clear()

    def _add(self, family: MetricFamilyFactory, name: str, description: str, kind: str) -> Any:
        made = family(name, description, kind)
        self._families.append(made)
        return made
