"""The values on the metrics port after requests whose tokens are known."""

from __future__ import annotations

import re
import urllib.request

from helpers.doc_names import ROOT
from helpers.fake_metrics import FakeFamilies
from helpers.raw_grpc import ask, llm_inputs
from helpers.server import Server, eventually
from naiad.triton_server.metrics.engine_metrics import Metrics

PROMPT_TOKENS, NEW_TOKENS = 23, 7
LLM = {"model": "llm", "version": "1"}


def test_tokens_and_latencies_are_counted(tiny: Server) -> None:
    names = {
        "vllm:prompt_tokens_total": PROMPT_TOKENS,
        "vllm:generation_tokens_total": NEW_TOKENS,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_per_output_token_seconds_count": NEW_TOKENS - 1,
    }
    before = {name: tiny.settled(name, **LLM) for name in names}
    inputs = llm_inputs([100 + i for i in range(PROMPT_TOKENS)], NEW_TOKENS, ignore_eos=True)
    assert not ask(tiny.grpc, "llm", inputs).errors

    def counted() -> dict[str, float]:
        return {name: tiny.metric(name, **LLM) - before[name] for name in names}

    eventually(lambda: counted() == names)


def test_sums_and_buckets_of_the_histograms_agree(tiny: Server) -> None:
    assert not ask(tiny.grpc, "llm", llm_inputs([1, 2, 3], 3, ignore_eos=True)).errors
    for name in ("vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds"):
        count = tiny.settled(f"{name}_count", **LLM)
        assert tiny.metric(f"{name}_bucket", le="+Inf", **LLM) == count > 0
        assert tiny.metric(f"{name}_sum", **LLM) > 0


def test_tensorrt_llms_gauges_exist_and_return_to_rest(tiny: Server) -> None:
    for kind in ("active", "scheduled", "context", "waiting"):
        eventually(lambda kind=kind: tiny.metric("nv_trt_llm_request_metrics", request_type=kind) == 0)
    assert tiny.metric("nv_trt_llm_request_metrics", request_type="max") == 32
    assert tiny.settled("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction") == 0
    blocks = {
        kind: tiny.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    assert blocks["used"] == blocks["fraction"] == 0
    assert blocks["free"] == blocks["max"] > 0
    assert blocks["tokens_per"] == 64


GAUGES = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "cpu gpu pinned"),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        "max free used tokens_per reused fraction",
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
}
HISTOGRAMS = {
    "nv_llm_input_token_len": "10 50 100 500 1000",
    "nv_llm_output_token_len": "10 50 100 500 1000",
    "vllm:time_to_first_token_seconds": "0.001 0.02 0.25 10",
    "vllm:time_per_output_token_seconds": "0.01 0.2 2.5",
    "vllm:e2e_request_latency_seconds": "1 2.5 60",
    "vllm:request_queue_time_seconds": "1 60",
    "vllm:request_inference_time_seconds": "1 60",
    "vllm:request_prefill_time_seconds": "1 60",
    "vllm:request_decode_time_seconds": "1 60",
    "vllm:request_prompt_tokens": "1 2 5 10 1000 2000",
    "vllm:request_generation_tokens": "1 2 5 10 1000 2000",
    "vllm:request_params_n": "1 2 5 10 20",
}


def test_families_have_tensorrt_llms_labels_and_buckets(tiny: Server) -> None:
    for name, (label, values) in GAUGES.items():
        for value in values.split():
            assert tiny.metric(name, **LLM, **{label: value}) >= 0
    for name, buckets in HISTOGRAMS.items():
        for bucket in buckets.split():
            assert tiny.metric(f"{name}_bucket", **LLM, le=bucket) >= 0
    for way in ("input", "output"):
        kind = {"response_metric_type": f"total_{way}_tokens"}
        assert tiny.metric(f"nv_llm_{way}_token_len_count", **LLM, **kind) >= 0
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert tiny.metric("vllm:request_success_total", **LLM, finished_reason=reason) >= 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert tiny.metric(f"vllm:{gauge}", **LLM) >= 0
    assert tiny.metric("nv_trt_llm_runtime_memory_metrics", memory_type="cpu") > 1e8
    assert tiny.metric("nv_trt_llm_general_metrics", general_type="timestamp") > 1.7e9


def test_every_metric_is_explained(tiny: Server) -> None:
    lines = tiny.metrics_text().splitlines()
    families = FakeFamilies()
    Metrics(families, "llm", "1", 2048)
    assert families.kinds.keys() >= {*GAUGES, *HISTOGRAMS, "vllm:request_success_total"}
    for name, kind in families.kinds.items():
        assert f"# HELP {name} {families.descriptions[name]}" in lines
        assert f"# TYPE {name} {kind}" in lines


def test_the_metrics_of_the_dashboard_and_the_alerts_exist(tiny: Server) -> None:
    with urllib.request.urlopen(f"http://{tiny.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    there = {re.match(r"[\w:]+", line).group() for line in text.splitlines() if line and line[0] != "#"}
    folder = ROOT / "docs" / "operations"
    for path in (folder / "grafana-dashboard.json", folder / "prometheus-alerts.yaml"):
        named = set(re.findall(r"(?<![\w:])(?:vllm:|nv_)\w+", path.read_text()))
        assert named
        assert named <= there
