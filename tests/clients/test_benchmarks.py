"""Load generators for the OpenAI API: every request succeeds, with as many tokens as were asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from perf.peers import environments as peers

from clients.environments import PIP_ARGS, python_of
from clients.served import PROGRAMS, Served

NUM_REQUESTS = 12
INPUT_TOKENS, OUTPUT_TOKENS = 48, 16


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(served: Served, tmp_path: Path, kind: str) -> None:
    report = run_aiperf(served, tmp_path, kind)
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["error_summary"] == []
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == OUTPUT_TOKENS
    assert report["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * OUTPUT_TOKENS
    if kind == "completions":
        assert report["total_usage_prompt_tokens"]["avg"] == NUM_REQUESTS * INPUT_TOKENS


def test_aiperf_cancels_requests(served: Served, tmp_path: Path) -> None:
    options = ("--request-cancellation-rate", "50", "--request-cancellation-delay", "0.05")
    report = run_aiperf(served, tmp_path, "chat", *options)
    causes = {each["error_details"]["type"] for each in report["error_summary"]}
    assert causes == {"RequestCancellationError"}
    assert report["request_count"]["avg"] < NUM_REQUESTS


def run_aiperf(served: Served, folder: Path, kind: str, *options: str) -> dict:
    served.run(
        *(python_of("aiperf").parent / "aiperf", "profile", "--ui", "none"),
        *("--url", served.root, "--model", served.model, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", served.model_dir, "--use-server-token-count"),
        *(("--per-chunk-usage",) if kind == "chat" else ()),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--extra-inputs", "ignore_eos:true"),
        *("--prompt-input-tokens-mean", str(INPUT_TOKENS)),
        *("--prompt-output-tokens-mean", str(OUTPUT_TOKENS), "--output-artifact-dir", folder),
        *("--no-gpu-telemetry", "--server-metrics", f"http://{served.server.metrics}/metrics", *options),
        # With these aiperf looks for a directory's path in the hub's cache.
        without=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    )
    return json.loads((folder / "profile_export_aiperf.json").read_text())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(served: Served, tmp_path: Path, path: str) -> None:
    report = tmp_path / "report.json"
    served.run(
        *(python_of("guidellm").parent / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={served.root},request_format={path}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={served.model_dir}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert metrics["output_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * OUTPUT_TOKENS
    if path == "/v1/completions":
        assert metrics["prompt_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * INPUT_TOKENS


@pytest.mark.parametrize(
    ("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("vllm", "/v1/completions")]
)
def test_vllm_bench(served: Served, tmp_path: Path, backend: str, path: str) -> None:
    served.run(
        *(peers.install("vllm", PIP_ARGS), PROGRAMS / "run_vllm.py"),
        *("--backend", backend, "--base-url", served.root, "--endpoint", path),
        *("--model", served.model_dir, "--served-model-name", served.model, "--dataset-name", "random"),
        *("--input-len", str(INPUT_TOKENS), "--output-len", str(OUTPUT_TOKENS), "--ignore-eos"),
        *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "report.json"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0), report["errors"]
    assert report["output_lens"] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert report["mean_ttft_ms"] > 0
