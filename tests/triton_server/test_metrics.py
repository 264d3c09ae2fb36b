from __future__ import annotations

import itertools
import re
from dataclasses import replace

from helpers.fake_metrics import FakeFamilies
from naiad.engine_process.observations import Ended, ObservationBatch
from naiad.outputs import EngineStats, MemoryUse, Timings
from naiad.sequence import FinishReason
from naiad.triton_server.metrics.engine_metrics import Metrics
from naiad.triton_server.metrics.request_metrics import (
    MANY_GAPS,
    MOST_GAPS,
    MOST_OBSERVATIONS,
    WRITING_S,
    RequestMetrics,
)

# A word of a name that its text has too.
UNITS = {"seconds", "tokens", "token", "block", "drafts"}


def ended() -> Ended:
    return Ended(
        reason=FinishReason.LENGTH,
        latency_s=20.0,
        timings=Timings(1.0, 2.0, 6.0, 14.0),
        num_prompt_tokens=5,
        num_output_tokens=7,
        num_sequences=2,
    )


def test_gauges_have_tensorrt_llms_values() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1", 2048)
    stats = EngineStats(
        num_running=3,
        num_waiting=2,
        num_compiling=1,
        num_blocks=10,
        num_used_blocks=4,
        block_size=64,
        max_num_seqs=8,
    )
    metrics.update(stats, ObservationBatch())
    requests = {
        key: families.find("nv_trt_llm_request_metrics", key).value for key in ("active", "max", "waiting")
    }
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert requests == {"active": 5, "max": 8, "waiting": 2}
    assert families.find("naiad_compiling_requests").value == 1
    assert [families.find(blocks, key).value for key in ("max", "free", "used", "tokens_per")] == [
        10,
        6,
        4,
        64,
    ]
    assert families.find(blocks, "fraction").value == 0.4
    assert families.find(blocks, "used").labels["model"] == "llm"


def test_unchanged_values_are_not_written_again() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1", 2048)
    for _ in range(3):
        metrics.update(EngineStats(num_running=3), ObservationBatch())
    assert families.find("nv_trt_llm_request_metrics", "scheduled").writes == 1


def test_a_reader_that_sees_no_active_request_sees_final_counters() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1", 2048)
    metrics.update(EngineStats(num_running=1), ObservationBatch())
    families.order.clear()
    metrics.update(EngineStats(total_generation_tokens=4), ObservationBatch(ended=[ended()]))
    gauges = {"nv_trt_llm_request_metrics", "vllm:num_requests_running"}
    assert gauges < set(families.order)
    first_gauge = min(families.order.index(name) for name in gauges)
    for name in ("vllm:generation_tokens_total", "vllm:request_success_total", "vllm:request_params_n"):
        assert families.order.index(name) < first_gauge


def test_gauges_of_steps_and_memory() -> None:
    families = FakeFamilies()
    stats = EngineStats(
        num_running=3,
        num_context_seqs=1,
        num_paused=2,
        num_context_tokens=70,
        total_steps=9,
        total_hit_tokens=130,
        block_size=64,
        timestamp_s=1700000000,
        memory=MemoryUse(5, 6, 7),
    )
    Metrics(families, "llm", "1", 2048).update(stats, ObservationBatch())
    values = {(name, *metric.labels.values()): metric.value for name, metric in families.metrics}
    for family, label, value in (
        ("inflight_batcher", "total_context_tokens", 70),
        ("inflight_batcher", "generation_requests", 2),
        ("inflight_batcher", "paused_requests", 2),
        ("inflight_batcher", "micro_batch_id", 0),
        ("general", "iteration_counter", 9),
        ("general", "timestamp", 1700000000_000_000),
        ("runtime_memory", "cpu", 5),
        ("runtime_memory", "gpu", 6),
        ("runtime_memory", "pinned", 7),
        ("kv_cache_block", "reused", 2),
    ):
        assert values[f"nv_trt_llm_{family}_metrics", "llm", "1", label] == value


def test_gauges_of_vllm() -> None:
    families = FakeFamilies()
    stats = EngineStats(num_running=3, num_waiting=2, num_blocks=10, num_used_blocks=4)
    Metrics(families, "llm", "1", 2048).update(stats, ObservationBatch())
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert [families.find(f"vllm:{name}").value for name in names] == [3, 2, 0.4, 0.4]
    assert families.find("vllm:num_requests_running").labels == {"model": "llm", "version": "1"}


def observed(families: FakeFamilies) -> dict[str, list[float]]:
    return {name: metric.observed for name, metric in families.metrics if metric.observed}


def test_a_request_is_observed_at_its_end() -> None:
    families = FakeFamilies()
    Metrics(families, "llm", "1", 2048).update(EngineStats(), ObservationBatch(ended=[ended()]))
    assert observed(families) == {
        "vllm:e2e_request_latency_seconds": [20.0],
        "vllm:request_queue_time_seconds": [1.0],
        "vllm:request_inference_time_seconds": [12.0],
        "vllm:request_prefill_time_seconds": [4.0],
        "vllm:request_decode_time_seconds": [8.0],
        "vllm:request_prompt_tokens": [5],
        "vllm:request_generation_tokens": [7],
        "vllm:request_params_n": [2],
        "nv_llm_input_token_len": [5],
        "nv_llm_output_token_len": [7],
    }


def test_requests_of_the_openai_server_are_counted_apart() -> None:
    families = FakeFamilies()
    some = ObservationBatch(first_token_s=[0.5], ended=[ended(), ended()])
    forwarded = [ObservationBatch(), some, ObservationBatch()]
    metrics = Metrics(families, "llm", "1", 2048, lambda: forwarded.pop(0))
    stats = EngineStats(total_steps=1)
    metrics.update(EngineStats(), ObservationBatch())
    assert not any(metric.labels.get("door") == "openai" for _, metric in families.metrics)
    metrics.update(stats, ObservationBatch(ended=[ended()]))
    # The same stats again: nothing but the requests is looked at.
    metrics.update(stats, ObservationBatch())
    assert forwarded == []
    ends = {
        metric.labels["door"]: metric.value
        for name, metric in families.metrics
        if name == "vllm:request_success_total" and metric.labels["finished_reason"] == "length"
    }
    assert ends == {"triton": 1, "openai": 2}
    first = [metric for name, metric in families.metrics if name == "vllm:time_to_first_token_seconds"]
    assert {metric.labels["door"]: metric.observed for metric in first} == {"triton": [], "openai": [0.5]}


def test_only_what_had_a_token_is_observed_but_every_end_is_counted() -> None:
    families = FakeFamilies()
    waited = replace(ended(), timings=Timings(1.0), num_output_tokens=0, reason=FinishReason.TIMEOUT)
    sibling = replace(ended(), num_sequences=0, reason=FinishReason.STOP)
    batch = ObservationBatch(ended=[waited, ended(), sibling, ended()])
    Metrics(families, "llm", "1", 2048).update(EngineStats(), batch)
    assert len(families.find("vllm:request_prompt_tokens").observed) == 3
    assert families.find("vllm:request_params_n").observed == [2, 2]
    reasons = ("stop", "length", "abort", "error", "timeout")
    ends = [families.find("vllm:request_success_total", reason).value for reason in reasons]
    assert ends == [1, 2, 0, 0, 1]


def test_buckets_and_labels_are_tensorrt_llms() -> None:
    families = FakeFamilies()
    Metrics(families, "llm", "1", 130)
    lengths = families.find("nv_llm_output_token_len")
    assert lengths.labels == {
        "model": "llm",
        "version": "1",
        "door": "triton",
        "response_metric_type": "total_output_tokens",
    }
    assert lengths.buckets == [10, 50, 100, 500, 1000]
    assert families.find("vllm:request_prompt_tokens").buckets == [1, 2, 5, 10, 20, 50, 100]
    assert families.find("vllm:request_params_n").buckets == [1, 2, 5, 10, 20]
    assert {1, 2.5, 5, 60} < set(families.find("vllm:e2e_request_latency_seconds").buckets or [])


def test_observations_that_there_is_no_time_for_wait_for_the_next_round() -> None:
    families = FakeFamilies()
    ticks = itertools.count()
    metrics = RequestMetrics(families, "llm", "1", 2048, lambda: WRITING_S / 5.5 * next(ticks))
    between = families.find("vllm:time_per_output_token_seconds")
    assert metrics.update(EngineStats(), ObservationBatch(gaps=[(1, 2), (2, 3), (3, 2)]))
    assert between.observed == [1, 1, 2, 2, 2]
    assert not metrics.update(EngineStats(), ObservationBatch(gaps=[(6, 1)]))
    assert between.observed == [1, 1, 2, 2, 2, 3, 3, 6]


def test_gaps_between_tokens_have_half_of_the_time() -> None:
    families = FakeFamilies()
    ticks = itertools.count()
    metrics = RequestMetrics(families, "llm", "1", 2048, lambda: WRITING_S / 8.5 * next(ticks))
    assert metrics.update(EngineStats(), ObservationBatch(first_token_s=[1.0] * 50, gaps=[(1, 50)]))
    num_first, num_between = (
        len(families.find(f"vllm:{name}").observed)
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds")
    )
    assert abs(num_first - num_between) <= 1 <= num_first


def test_observations_that_can_never_be_written_are_dropped() -> None:
    """Without any time, a busy server keeps one gap of an output of many tokens, and only the newest gaps."""
    families = FakeFamilies()
    ticks = itertools.count()
    metrics = RequestMetrics(families, "llm", "1", 2048, lambda: 2 * WRITING_S * next(ticks))
    metrics.update(EngineStats(), ObservationBatch(gaps=[(1.0, MANY_GAPS), (2.0, 50)]))
    assert [seconds for _, seconds in metrics._gaps] == [1.0] * MANY_GAPS + [2.0]
    metrics.update(EngineStats(), ObservationBatch(gaps=[(3.0, 1)] * MOST_GAPS))
    assert [seconds for _, seconds in metrics._gaps] == [3.0] * MOST_GAPS
    metrics.update(EngineStats(), ObservationBatch(first_token_s=[1.0] * (MOST_OBSERVATIONS + 1)))
    assert len(metrics._queue) == MOST_OBSERVATIONS


def test_latencies_are_observed_one_by_one() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1", 2048)
    metrics.update(EngineStats(), ObservationBatch(first_token_s=[0.5], gaps=[(0.1, 2)]))
    assert families.find("vllm:time_to_first_token_seconds").observed == [0.5]
    assert families.find("vllm:time_per_output_token_seconds").observed == [0.1, 0.1]


def test_what_only_naiad_counts() -> None:
    families = FakeFamilies()
    stats = EngineStats(total_draft_failures=2, total_late_compiles=3)
    Metrics(families, "llm", "1", 2048).update(stats, ObservationBatch())
    assert families.find("naiad_draft_failures_total").value == 2
    assert families.find("naiad_late_compiles_total").value == 3


def test_each_family_says_what_it_counts() -> None:
    families = FakeFamilies()
    Metrics(families, "llm", "1", 2048)
    descriptions = families.descriptions
    assert len(set(descriptions.values())) == len(descriptions)
    for name, text in descriptions.items():
        assert len(text.split()) >= 4, f"{name}: {text}"
        for unit in UNITS & set(re.split("[_:]", name)):
            assert re.search(rf"\b{unit}s?\b", text, re.IGNORECASE), f"{name}: {text}"
    assert descriptions["vllm:num_preemptions_total"].startswith("Preemptions")
    assert descriptions["vllm:spec_decode_num_drafts_total"].startswith("Drafts verified")
    assert "0 to 1" in descriptions["vllm:kv_cache_usage_perc"]
    assert "in bytes" in descriptions["nv_trt_llm_runtime_memory_metrics"]
    assert "microseconds" in descriptions["nv_trt_llm_general_metrics"]
