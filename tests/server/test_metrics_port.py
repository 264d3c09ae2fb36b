"""What the metrics port says after requests whose tokens are known."""

from __future__ import annotations

import re
import urllib.request

from helpers.doc_names import ROOT
from helpers.raw_grpc import ask, llm_inputs
from helpers.server import Server, eventually

PROMPT_TOKENS, NEW_TOKENS = 23, 7
LLM = {"model": "llm", "version": "1"}


def test_tokens_and_latencies_are_counted(server: Server) -> None:
    names = {
        "vllm:prompt_tokens_total": PROMPT_TOKENS,
        "vllm:generation_tokens_total": NEW_TOKENS,
        "vllm:time_to_first_token_seconds_count": 1,
    }
    before = {name: server.settled(name, **LLM) for name in names}
    inputs = llm_inputs([100 + i for i in range(PROMPT_TOKENS)], NEW_TOKENS, ignore_eos=True)
    between = "vllm:time_per_output_token_seconds_count"
    num_before = server.metric(between, **LLM)
    assert not ask(server.grpc, "llm", inputs).errors

    def counted() -> dict[str, float]:
        return {name: server.metric(name, **LLM) - before[name] for name in names}

    eventually(lambda: counted() == names)
    # Tokens that are late travel in one response.
    assert 0 < server.settled(between, **LLM) - num_before <= NEW_TOKENS - 1


def test_sums_and_buckets_of_the_histograms_agree(server: Server) -> None:
    assert not ask(server.grpc, "llm", llm_inputs([1, 2, 3], 3, ignore_eos=True)).errors
    for name in ("vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds"):
        count = server.settled(f"{name}_count", **LLM)
        assert server.metric(f"{name}_bucket", le="+Inf", **LLM) == count > 0
        assert server.metric(f"{name}_sum", **LLM) > 0


def test_gauges_of_the_reference_are_there_and_return_to_rest(server: Server) -> None:
    for kind in ("active", "scheduled", "context", "waiting"):
        eventually(lambda kind=kind: server.metric("nv_trt_llm_request_metrics", request_type=kind) == 0)
    assert server.metric("nv_trt_llm_request_metrics", request_type="max") == 32
    assert server.settled("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction") == 0
    blocks = {
        kind: server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    assert blocks["used"] == blocks["fraction"] == 0
    assert blocks["free"] == blocks["max"] > 0
    assert blocks["tokens_per"] == 64


def test_every_metric_is_explained(server: Server) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for name in ("nv_trt_llm_request_metrics", "vllm:prompt_tokens_total"):
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} " in text


def test_what_the_dashboard_and_the_alerts_speak_of_is_there(server: Server) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    there = {re.match(r"[\w:]+", line).group() for line in text.splitlines() if line and line[0] != "#"}
    folder = ROOT / "docs" / "operations"
    for path in (folder / "grafana-dashboard.json", folder / "prometheus-alerts.yaml"):
        named = set(re.findall(r"(?<![\w:])(?:vllm:|nv_)\w+", path.read_text()))
        assert named
        assert named <= there
