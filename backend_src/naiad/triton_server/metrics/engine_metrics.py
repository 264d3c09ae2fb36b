"""Naiad's metrics on Triton's metrics port, under TensorRT-LLM's names and vLLM's.

Triton's custom metrics are not thread-safe, so only the housekeeping thread calls `update`.
Each write is an IPC round trip, so a value that did not change is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from naiad.engine_process.observations import ObservationBatch
from naiad.frontend.request_families import OPENAI_DOOR, CountedFates
from naiad.outputs import EngineStats
from naiad.triton_server.metrics.request_metrics import MetricFamilyFactory, RequestMetrics
from naiad.triton_server.metrics.tenant_metrics import TenantMetrics
from naiad.usage import TenantUsage

Read = Callable[[EngineStats], float]


def _used_share(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


# (family, label name) → label value → how to read the gauge.
GAUGES: dict[tuple[str, str], dict[str, Read]] = {
    ("nv_trt_llm_request_metrics", "request_type"): {
        "active": lambda s: s.num_running + s.num_waiting,
        "max": lambda s: s.max_num_seqs,
        "scheduled": lambda s: s.num_running,
        "context": lambda s: s.num_context_seqs,
        "waiting": lambda s: s.num_waiting,
    },
    ("nv_trt_llm_runtime_memory_metrics", "memory_type"): {
        "cpu": lambda s: s.memory.cpu_bytes,
        "gpu": lambda s: s.memory.gpu_bytes,
        "pinned": lambda s: s.memory.pinned_bytes,
    },
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
        "max": lambda s: s.num_blocks,
        "free": lambda s: s.num_blocks - s.num_used_blocks,
        "used": lambda s: s.num_used_blocks,
        "tokens_per": lambda s: s.block_size,
        "reused": lambda s: s.total_hit_tokens // s.block_size if s.block_size else 0,
        "fraction": _used_share,
    },
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
        "total_context_tokens": lambda s: s.num_context_tokens,
        "generation_requests": lambda s: s.num_running - s.num_context_seqs,
        "micro_batch_id": lambda _: 0,
        "paused_requests": lambda s: s.num_paused,
    },
    ("nv_trt_llm_general_metrics", "general_type"): {
        "timestamp": lambda s: s.timestamp_s * 1_000_000,
        "iteration_counter": lambda s: s.total_steps,
    },
    ("vllm:num_requests_running", ""): {"": lambda s: s.num_running},
    ("vllm:num_requests_waiting", ""): {"": lambda s: s.num_waiting},
    ("naiad_compiling_requests", ""): {"": lambda s: s.num_compiling},
    ("vllm:kv_cache_usage_perc", ""): {"": _used_share},
    ("vllm:gpu_cache_usage_perc", ""): {"": _used_share},
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
    "naiad_late_compiles_total": lambda s: s.total_late_compiles,
    "naiad_kv_events_total": lambda s: s.total_kv_events,
    "naiad_kv_events_dropped_total": lambda s: s.total_dropped_kv_events,
}
DESCRIPTIONS: dict[str, str] = {
    "nv_trt_llm_request_metrics": "Sequences by state, and the most that may run at once",
    "nv_trt_llm_runtime_memory_metrics": "Memory of the engine process in bytes",
    "nv_trt_llm_kv_cache_block_metrics": "Blocks of the KV cache by state, tokens of a block, used fraction",
    "nv_trt_llm_inflight_batcher_metrics": "Prompt tokens of a step, sequences that generate, preempted ones",
    "nv_trt_llm_general_metrics": "Time of the last step in microseconds since the epoch, number of steps",
    "vllm:num_requests_running": "Sequences that are running",
    "vllm:num_requests_waiting": "Sequences that wait to run, those that wait for a grammar included",
    "naiad_compiling_requests": "Sequences that wait until their grammar is compiled",
    "vllm:kv_cache_usage_perc": "Fraction of the KV cache's blocks that are used, 0 to 1",
    "vllm:gpu_cache_usage_perc": "vLLM's older name of vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total": "Prompt tokens of sequences that have generated a token",
    "vllm:generation_tokens_total": "Tokens generated",
    "vllm:num_preemptions_total": "Preemptions of sequences that gave up their KV cache to others",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "vllm:prefix_cache_hits_total": "Prompt tokens found in the prefix cache",
    "vllm:spec_decode_num_drafts_total": "Drafts verified",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens verified",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens accepted",
    "naiad_draft_failures_total": "Failures of the draft model, each of which cost its step's drafts",
    "naiad_late_compiles_total": "Kernels compiled after the start, each while a request waited",
    "naiad_kv_events_total": "Blocks stored in the prefix cache or removed from it that were published",
    "naiad_kv_events_dropped_total": "The same that were not published, because too many were pending",
}
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(slots=True)
class _Written:
    """A metric, the function that reads its value from the stats, and the value last written."""

    metric: Any
    read: Read
    value: float


class Metrics:
    """All metrics of one `llm` model."""

    def __init__(
        self,
        family: MetricFamilyFactory,
        model: str,
        version: str,
        max_model_len: int,
        take_forwarded: Callable[[], ObservationBatch] = ObservationBatch,
        fates: Sequence[CountedFates] = (),
        usages: Callable[[], Sequence[TenantUsage]] = tuple,
    ) -> None:
        """Create the families and their metrics.

        Args:
            family: makes a metric family.
            model: the model's name.
            version: the model's version.
            max_model_len: upper end of the buckets of lengths, in tokens.
            take_forwarded: returns what the OpenAI server has observed since the last call. It leaves out
                the gaps between tokens: to write one costs more than the server spends on a token.
            fates: what else is counted of the model's requests.
            usages: returns what each tenant has used, the same object until it changes.
        """
        self._family = family
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []
        self._gauges = [
            gauge
            for (name, label), reads in GAUGES.items()
            for gauge in self._make_gauges(name, label, reads)
        ]
        self._counters = [
            _Written(self._add(name, DESCRIPTIONS[name], "counter").Metric(labels=self._labels), read, 0)
            for name, read in COUNTERS.items()
        ]
        self._accepted_at = self._add(ACCEPTED_AT, "Accepted draft tokens by their place", "counter")
        self._num_places = 0
        self._last_stats: EngineStats | None = None
        self._requests = RequestMetrics(family, model, version, max_model_len, fates=fates)
        self._tenants = TenantMetrics(family, self._labels, usages)
        self._take_forwarded = take_forwarded
        # Made for the first such request: clients that look for a family by its name alone find one metric.
        self._openai_requests: RequestMetrics | None = None
        self._make_openai_requests = partial(
            RequestMetrics, family, model, version, max_model_len, door=OPENAI_DOOR
        )

    def update(self, stats: EngineStats, batch: ObservationBatch) -> bool:
        """Write the metrics that have changed.

        Gauges are written last, so that a reader who sees no active request also sees the final counters.

        Args:
            stats: the engine's stats; totals never decrease.
            batch: observations of requests since the last call.

        Returns:
            Whether observations remain that there was no time to write.
        """
        self._tenants.update()
        if stats is self._last_stats:
            return self._update_requests(stats, batch)
        self._add_places(len(stats.total_accepted_tokens_at))
        for counter in self._counters:
            total = counter.read(stats)
            if total > counter.value:
                counter.metric.increment(total - counter.value)
                counter.value = total
        has_more = self._update_requests(stats, batch)
        for gauge in self._gauges:
            value = gauge.read(stats)
            if value != gauge.value:
                gauge.metric.set(value)
                gauge.value = value
        self._last_stats = stats
        return has_more

    def delete(self) -> None:
        """Remove the metrics from the port; otherwise Triton keeps them after the model is unloaded."""
        self._requests.delete()
        if self._openai_requests is not None:
            self._openai_requests.delete()
        self._tenants.delete()
        self._gauges.clear()
        self._counters.clear()
        del self._accepted_at
        self._families.clear()

    def _update_requests(self, stats: EngineStats, batch: ObservationBatch) -> bool:
        has_more = self._requests.update(stats, batch)
        forwarded = self._take_forwarded()
        if self._openai_requests is None and (forwarded.ended or forwarded.first_token_s):
            self._openai_requests = self._make_openai_requests()
        if self._openai_requests is not None:
            has_more |= self._openai_requests.update(stats, forwarded)
        return has_more

    def _add_places(self, num_places: int) -> None:
        """Create counters of accepted tokens for further draft positions, as the engine reports them."""
        for place in range(self._num_places, num_places):
            metric = self._accepted_at.Metric(labels=self._labels | {"position": str(place)})
            self._counters.append(_Written(metric, partial(_accepted_at, place), 0))
        self._num_places = max(self._num_places, num_places)

    def _make_gauges(self, name: str, label: str, reads: dict[str, Read]) -> list[_Written]:
        made = self._add(name, DESCRIPTIONS[name], "gauge")
        return [
            _Written(made.Metric(labels=self._labels | ({label: value} if label else {})), read, 0)
            for value, read in reads.items()
        ]

    def _add(self, name: str, description: str, kind: str) -> Any:
        made = self._family(name, description, kind)
        self._families.append(made)
        return made


def _accepted_at(place: int, stats: EngineStats) -> float:
    return stats.total_accepted_tokens_at[place] if place < len(stats.total_accepted_tokens_at) else 0
