from __future__ import annotations

from helpers.fake_metrics import FakeFamilies
from naiad.outputs import EngineStats
from naiad.triton_server.metrics import Metrics
from naiad.triton_server.observations import LatencyBatch


def test_gauges_say_what_the_reference_says() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1")
    stats = EngineStats(
        num_running=3, num_waiting=2, num_blocks=10, num_used_blocks=4, block_size=64, max_num_seqs=8
    )
    metrics.update(stats, LatencyBatch())
    requests = {
        key: families.find("nv_trt_llm_request_metrics", key).value for key in ("active", "max", "waiting")
    }
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert requests == {"active": 5, "max": 8, "waiting": 2}
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
    metrics = Metrics(families, "llm", "1")
    for _ in range(3):
        metrics.update(EngineStats(num_running=3), LatencyBatch())
    assert families.find("nv_trt_llm_request_metrics", "scheduled").writes == 1


def test_counters_go_on_when_the_engine_starts_again() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1")
    for total in (5, 9, 2, 4):
        metrics.update(EngineStats(total_generation_tokens=total), LatencyBatch())
    assert families.find("vllm:generation_tokens_total").value == 9 + 4


def test_latencies_are_observed_once_a_token() -> None:
    families = FakeFamilies()
    metrics = Metrics(families, "llm", "1")
    metrics.update(EngineStats(), LatencyBatch(first_token_s=[0.5], inter_token_s=[0.1, 0.1]))
    assert families.find("vllm:time_to_first_token_seconds").observed == [0.5]
    assert families.find("vllm:time_per_output_token_seconds").observed == [0.1, 0.1]


def test_failures_of_the_draft_model_are_counted() -> None:
    families = FakeFamilies()
    Metrics(families, "llm", "1").update(EngineStats(total_draft_failures=2), LatencyBatch())
    assert families.find("naiad_draft_failures_total").value == 2
