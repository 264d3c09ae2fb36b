"""Metrics of one model's requests: finish reasons, lengths and latencies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from naiad.outputs import EngineStats
from naiad.sequence import FinishReason
from naiad.triton_server.metrics.observations import Ended, ObservationBatch

# fmt: off
FIRST_TOKEN_BUCKETS_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]
INTER_TOKEN_BUCKETS_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
REQUEST_BUCKETS_S = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
]
# fmt: on
SEQUENCES_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0]
LENGTH_BUCKETS_TOKENS = [10.0, 50.0, 100.0, 500.0, 1000.0]

# Time for writing in each round of the housekeeping thread, which also checks on clients. Writing an
# observation is an IPC round trip of 0.15 to 0.3 ms on a busy machine with two cores, and every response
# causes one.
WRITING_S = 0.01
# If more than MANY_GAPS gaps between tokens wait to be written, an output of several tokens adds only one;
# beyond MOST_GAPS the oldest are dropped. Writing one takes a fifth of a millisecond.
MANY_GAPS, MOST_GAPS = 1000, 5000
# The same limit for the other observations; it holds those of some thousand requests.
MOST_OBSERVATIONS = 50_000
_BETWEEN_TOKENS = "time_per_output_token_seconds"

Pending = deque[tuple[str, float]]

# vLLM's finish reasons; vLLM has none for a deadline.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
    FinishReason.TIMEOUT: "timeout",
}


class MetricFamilyFactory(Protocol):
    """Makes a metric family, as `pb.metric_family` does."""

    def __call__(self, name: str, description: str, kind: str) -> Any:
        """Return the family of this name and kind."""


class RequestMetrics:
    """The request metrics of one model to which clients send requests, whichever model owns the engine."""

    def __init__(
        self,
        family: MetricFamilyFactory,
        model: str,
        version: str,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the families and their metrics, labelled with the model.

        Args:
            family: makes a metric family.
            model: the model's name.
            version: the model's version.
            max_model_len: upper end of the buckets of lengths, in tokens.
            clock: returns the time in seconds.
        """
        self._clock = clock
        # (histogram, value) pairs still to be written. Gaps between tokens are apart because there may be too
        # many to write them all.
        self._queue: Pending = deque(maxlen=MOST_OBSERVATIONS)
        self._gaps: Pending = deque(maxlen=MOST_GAPS)
        self._family = family
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []
        lengths = one_two_five(max_model_len)
        self._histograms = {
            name: self._histogram(f"vllm:{name}", description, buckets)
            for name, description, buckets in (
                ("time_to_first_token_seconds", "Seconds to first token", FIRST_TOKEN_BUCKETS_S),
                (_BETWEEN_TOKENS, "Seconds per token", INTER_TOKEN_BUCKETS_S),
                ("e2e_request_latency_seconds", "Seconds from arrival to end", REQUEST_BUCKETS_S),
                ("request_queue_time_seconds", "Seconds until first computed", REQUEST_BUCKETS_S),
                ("request_inference_time_seconds", "Seconds from then to last token", REQUEST_BUCKETS_S),
                ("request_prefill_time_seconds", "Seconds from then to first token", REQUEST_BUCKETS_S),
                ("request_decode_time_seconds", "Seconds from first to last token", REQUEST_BUCKETS_S),
                ("request_prompt_tokens", "Tokens of the prompt", lengths),
                ("request_generation_tokens", "New tokens", lengths),
                ("request_params_n", "Sequences asked for", SEQUENCES_BUCKETS),
            )
        }
        for way in ("input", "output"):
            self._histograms[way] = self._histogram(
                f"nv_llm_{way}_token_len",
                f"Tokens of the {way}",
                LENGTH_BUCKETS_TOKENS,
                response_metric_type=f"total_{way}_tokens",
            )
        ends = self._add("vllm:request_success_total", "Requests that have ended", "counter")
        self._ends = {
            reason: ends.Metric(labels=self._labels | {"finished_reason": name})
            for reason, name in REASONS.items()
        }

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
        for ended in batch.ended:
            if ended.has_begun:
                self._queue += _values_of(ended).items()
        self._queue += (("time_to_first_token_seconds", seconds) for seconds in batch.first_token_s)
        for each_s, num_tokens in batch.gaps:
            self._gaps += [(_BETWEEN_TOKENS, each_s)] * (num_tokens if len(self._gaps) < MANY_GAPS else 1)
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
        self._families.clear()

    def _observe(self, pending: Pending, end_s: float) -> None:
        while pending and self._clock() < end_s:
            name, value = pending.popleft()
            self._histograms[name].observe(value)

    def _histogram(self, name: str, description: str, buckets: list[float], **labels: str) -> Any:
        made = self._add(name, description, "histogram")
        return made.Metric(labels=self._labels | labels, buckets=buckets)

    def _add(self, name: str, description: str, kind: str) -> Any:
        made = self._family(name, description, kind)
        self._families.append(made)
        return made


def _values_of(ended: Ended) -> dict[str, float]:
    """Histogram → value to observe."""
    values: dict[str, float] = {
        "e2e_request_latency_seconds": ended.latency_s,
        "request_prompt_tokens": ended.num_prompt_tokens,
        "request_generation_tokens": ended.num_output_tokens,
        "input": ended.num_prompt_tokens,
        "output": ended.num_output_tokens,
    }
    if ended.num_sequences:
        values["request_params_n"] = ended.num_sequences
    times = ended.timings
    if times.first_token_s:
        values |= {
            "request_queue_time_seconds": times.first_scheduled_s - times.arrival_s,
            "request_inference_time_seconds": times.last_token_s - times.first_scheduled_s,
            "request_prefill_time_seconds": times.first_token_s - times.first_scheduled_s,
            "request_decode_time_seconds": times.last_token_s - times.first_token_s,
        }
    return values


def one_two_five(limit: int) -> list[float]:
    """The bounds 1, 2, 5, 10, 20, 50 … up to the limit."""
    steps = (digit * 10.0**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [step for step in steps if step <= limit]
