"""The metrics of requests: families, buckets and values, the same for every frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from naiad.engine_process.observations import Ended
from naiad.sequence import FinishReason

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

# The label that says by which server a request came, and its values.
DOOR = "door"
TRITON_DOOR, OPENAI_DOOR = "triton", "openai"

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
BETWEEN_TOKENS = "vllm:time_per_output_token_seconds"
ENDS = "vllm:request_success_total"
ENDS_DESCRIPTION = "Ended sequences by finish reason; a beam search counts as one"
END_LABEL = "finished_reason"
# vLLM's finish reasons; vLLM has none for a deadline.
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
    FinishReason.TIMEOUT: "timeout",
}


# The label that says what became of a span or a record, and its values.
FATE = "fate"
SENT, WRITTEN, DROPPED = "sent", "written", "dropped"


class CountedFates(Protocol):
    """Something that is sent or written beside the requests, or dropped.

    Attributes:
        family: name of the metric that counts it.
        description: what it counts.
    """

    family: str
    description: str

    def counts(self) -> dict[str, int]:
        """Fate → how many had it."""


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """A histogram of requests.

    Attributes:
        name: its name on the metrics port.
        description: what it counts.
        buckets: the upper bounds, without the infinite one.
        labels: labels that all of its metrics have.
    """

    name: str
    description: str
    buckets: list[float]
    labels: Mapping[str, str] = field(default_factory=dict)


def histogram_families(max_model_len: int) -> list[HistogramFamily]:
    """All histograms of a model's requests.

    Args:
        max_model_len: upper end of the buckets of lengths, in tokens.
    """
    lengths = one_two_five(max_model_len)
    families = [
        HistogramFamily(
            FIRST_TOKEN,
            "Seconds from arrival until the first token has come from the engine",
            FIRST_TOKEN_BUCKETS_S,
        ),
        HistogramFamily(BETWEEN_TOKENS, "Seconds between two tokens of a sequence", INTER_TOKEN_BUCKETS_S),
    ]
    families += [
        HistogramFamily(f"vllm:{name}", description, buckets)
        for name, description, buckets in (
            ("e2e_request_latency_seconds", "Seconds from arrival to the end", REQUEST_BUCKETS_S),
            ("request_queue_time_seconds", "Seconds from arrival until first computed", REQUEST_BUCKETS_S),
            (
                "request_inference_time_seconds",
                "Seconds from first computed to the last token",
                REQUEST_BUCKETS_S,
            ),
            (
                "request_prefill_time_seconds",
                "Seconds from first computed to the first token",
                REQUEST_BUCKETS_S,
            ),
            (
                "request_decode_time_seconds",
                "Seconds from the first token to the last one",
                REQUEST_BUCKETS_S,
            ),
            ("request_prompt_tokens", "Prompt tokens of a sequence", lengths),
            ("request_generation_tokens", "New tokens of a sequence, or of all beams of a search", lengths),
            ("request_params_n", "Sequences asked for with a prompt", SEQUENCES_BUCKETS),
        )
    ]
    return families + [
        HistogramFamily(
            f"nv_llm_{way}_token_len",
            f"Tokens of a sequence's {way}",
            LENGTH_BUCKETS_TOKENS,
            {"response_metric_type": f"total_{way}_tokens"},
        )
        for way in ("input", "output")
    ]


def values_of(ended: Ended) -> dict[str, float]:
    """Name of the histogram → value to observe, of a sequence that has generated a token."""
    values: dict[str, float] = {
        "vllm:e2e_request_latency_seconds": ended.latency_s,
        "vllm:request_prompt_tokens": ended.num_prompt_tokens,
        "vllm:request_generation_tokens": ended.num_output_tokens,
        "nv_llm_input_token_len": ended.num_prompt_tokens,
        "nv_llm_output_token_len": ended.num_output_tokens,
    }
    if ended.num_sequences:
        values["vllm:request_params_n"] = ended.num_sequences
    times = ended.timings
    if times.first_token_s:
        values |= {
            "vllm:request_queue_time_seconds": times.first_scheduled_s - times.arrival_s,
            "vllm:request_inference_time_seconds": times.last_token_s - times.first_scheduled_s,
            "vllm:request_prefill_time_seconds": times.first_token_s - times.first_scheduled_s,
            "vllm:request_decode_time_seconds": times.last_token_s - times.first_token_s,
        }
    return values


def one_two_five(limit: int) -> list[float]:
    """The bounds 1, 2, 5, 10, 20, 50 … up to the limit."""
    steps = (digit * 10.0**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [step for step in steps if step <= limit]
