"""`/metrics` and `/health/deep` of the OpenAI server, beside Triton's metrics port."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.openai_api import COMPLETIONS, connect, post, refused, streamed, whole
from helpers.prometheus import Scrape, read_page
from helpers.raw_grpc import ask, llm_inputs
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import add_to_repository, create_repository

NUM_OPENAI, NUM_TRITON = 3, 2
NEW_TOKENS = 5
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
BY_DOOR = (
    "vllm:time_to_first_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_generation_tokens_sum",
    "vllm:request_prompt_tokens_sum",
    "nv_llm_output_token_len_sum",
)
BETWEEN = "vllm:time_per_output_token_seconds_count"


@pytest.fixture(scope="module")
def api(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("openai") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000")
    add_to_repository(repository, tiny_dir, "second")
    with running(leaving, repository, "--openai-port", "0", "--openai-lenient") as server:
        yield server


def scraped(server: Server) -> Scrape:
    status, headers, raw = post(server, "/metrics", b"", "GET")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read_page(raw.decode())


def on_tritons_port(server: Server) -> Scrape:
    """Our families on Triton's port."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        page = read_page(answer.read().decode())
    ours = ("vllm:", "nv_llm_", "nv_trt_llm_", "naiad_")
    return Scrape({name: each for name, each in page.families.items() if name.startswith(ours)})


def test_each_request_is_counted_once_on_either_port(api: Server) -> None:
    before = scraped(api)
    asked = {"prompt": "Hello", "max_tokens": NEW_TOKENS, "ignore_eos": True}
    num_prompt_tokens = whole(api, COMPLETIONS, **asked).usage["prompt_tokens"]
    for _ in range(NUM_OPENAI - 1):
        streamed(api, COMPLETIONS, **asked)
    for _ in range(NUM_TRITON):
        assert not ask(api.grpc, "llm", llm_inputs([7] * 11, NEW_TOKENS, ignore_eos=True)).errors
    num_prompt = {"openai": NUM_OPENAI * num_prompt_tokens, "triton": NUM_TRITON * 11}
    num_requests = {"openai": NUM_OPENAI, "triton": NUM_TRITON}

    def counted(page: Scrape) -> dict[Any, float]:
        def more(name: str, **labels: str) -> float:
            # Triton's port has no metrics of this door before they have counted something.
            return sum(page.values(name, **labels)) - before.value(name, **labels)

        found: dict[Any, float] = {name: more(name, model="llm") for name in COUNTERS}
        for door in num_requests:
            labels = {"model": "llm", "door": door}
            found |= {(name, door): more(name, **labels) for name in BY_DOOR}
            ends = "vllm:request_success_total"
            found[ends, door] = more(ends, finished_reason="length", **labels)
        return found

    expected: dict[Any, float] = {
        "vllm:prompt_tokens_total": sum(num_prompt.values()),
        "vllm:generation_tokens_total": (NUM_OPENAI + NUM_TRITON) * NEW_TOKENS,
    }
    for door, number in num_requests.items():
        values = (number, number, number, number * NEW_TOKENS, num_prompt[door], number * NEW_TOKENS)
        expected |= {(name, door): value for name, value in zip(BY_DOOR, values, strict=True)}
        expected["vllm:request_success_total", door] = number
    eventually(lambda: counted(scraped(api)) == expected)
    eventually(lambda: counted(on_tritons_port(api)) == expected)
    for door, number in num_requests.items():
        labels = {"model": "llm", "door": door}
        gaps = scraped(api).value(BETWEEN, **labels) - before.value(BETWEEN, **labels)
        assert gaps == number * (NEW_TOKENS - 1)


def test_both_ports_have_the_same_families_and_gauges(api: Server) -> None:
    here, there = scraped(api), on_tritons_port(api)
    own = {name for name in here.families if name.startswith("naiad_openai_")}
    shown = here.families.keys() - own - {"vllm:cache_config_info", "vllm:lora_requests_info"}
    assert shown == {name for name, family in there.families.items() if family.samples}
    assert own >= {"naiad_openai_requests_total", "naiad_openai_open_streams"}
    assert shown > {"nv_trt_llm_request_metrics", "vllm:num_requests_running", "naiad_late_compiles_total"}
    for name in shown:
        assert here.families[name].kind == there.families[name].kind
    for name in ("nv_trt_llm_kv_cache_block_metrics", "vllm:generation_tokens_total"):
        assert here.families[name].samples == there.families[name].samples


def test_gateways_learn_the_size_of_each_kv_cache(api: Server) -> None:
    page = scraped(api)
    for name, model in (("first", "llm"), ("second", "second_llm")):
        num_blocks, size = (
            str(int(page.value("nv_trt_llm_kv_cache_block_metrics", model=model, kv_cache_block_type=kind)))
            for kind in ("max", "tokens_per")
        )
        labels = {"model_name": name, "block_size": size, "num_gpu_blocks": num_blocks}
        assert page.value("vllm:cache_config_info", model=model, **labels) == 1


def test_gateways_learn_that_there_are_no_adapters(api: Server) -> None:
    now_s, page = time.time(), scraped(api)
    none = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    for name, model in (("first", "llm"), ("second", "second_llm")):
        assert page.value("vllm:lora_requests_info", model=model, model_name=name, **none) >= now_s


def test_requests_streams_and_unknown_fields_are_counted(api: Server) -> None:
    def count(page: Scrape, **labels: str) -> float:
        return sum(page.values("naiad_openai_requests_total", **labels))

    before = scraped(api)
    assert refused(api, COMPLETIONS, {"model": "none", "prompt": "a"})[0] == 404
    whole(api, COMPLETIONS, prompt="a", max_tokens=1, invented=1)
    after = scraped(api)
    assert after.value("naiad_openai_passed_over_fields_total", field="invented") == 1
    assert count(after, route=COMPLETIONS, status="404") - count(before, route=COMPLETIONS, status="404") == 1
    assert count(after, route=COMPLETIONS, status="200") - count(before, route=COMPLETIONS, status="200") == 1
    # The scrape before is an ended request itself.
    assert count(after, route="/metrics") - count(before, route="/metrics") == 1
    assert after.value("naiad_openai_open_streams") == 0
    assert after.value("naiad_openai_triton_metrics_up") == 1


def deep_health(server: Server, query: str = "") -> tuple[int, dict[str, Any]]:
    status, _, raw = post(server, f"/health/deep{query}", b"", "GET")
    return status, json.loads(raw)


def test_many_deep_probes_cost_one_inference_of_each_model(api: Server) -> None:
    name = "vllm:request_success_total"

    def ends(model: str) -> float:
        return sum(scraped(api).values(name, model=model, door="openai"))

    before = {model: ends(model) for model in ("llm", "second_llm")}
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: deep_health(api), range(64)))
    for status, answer in answers:
        assert status == 200
        assert answer["models"].keys() == {"first", "second"}
        assert all(each["status"] == "ok" and each["seconds"] > 0 for each in answer["models"].values())
    # On a slow machine the result may have become too old in between.
    for model, number in before.items():
        assert 1 <= ends(model) - number <= 3


def test_a_stopped_engine_is_named_and_metrics_are_still_there(api: Server) -> None:
    engines = api.processes("naiad.engine_process")
    (stopped,) = [each for each in engines if "second_llm" in " ".join(each.cmdline())]
    stopped.send_signal(signal.SIGSTOP)
    try:
        # A result of before may be kept for a moment.
        eventually(lambda: deep_health(api)[0] == 503, 60)
        status, answer = deep_health(api, "?model=second")
        assert (status, answer["models"]["second"]["status"]) == (503, "failed")
        assert "`second`" in answer["error"]["message"]
        assert deep_health(api, "?model=first")[0] == 200
        assert post(api, "/health", b"", "GET")[0] == 200
        assert scraped(api).value("naiad_openai_triton_metrics_up") == 1
    finally:
        stopped.send_signal(signal.SIGCONT)
    eventually(lambda: deep_health(api)[0] == 200, 60)


def test_the_page_is_there_while_triton_is_not(api: Server) -> None:
    ended = {"model": "llm", "door": "openai", "finished_reason": "length"}
    whole(api, COMPLETIONS, prompt="a", max_tokens=1, ignore_eos=True)
    before = scraped(api).value("vllm:request_success_total", **ended)
    (triton,) = [each for each in api.processes("tritonserver") if each.name() == "tritonserver"]
    triton.kill()
    eventually(lambda: scraped(api).value("naiad_openai_triton_metrics_up") == 0)
    page = scraped(api)
    assert page.value("vllm:request_success_total", **ended) == before
    assert page.value("naiad_openai_open_streams") == 0
    # The old engine may answer for a moment yet.
    eventually(lambda: scraped(api).value("naiad_openai_triton_metrics_up") == 1, 120)
    eventually(lambda: deep_health(api)[0] == 200, 120)
    whole(api, COMPLETIONS, prompt="a", max_tokens=1, ignore_eos=True)
    eventually(lambda: scraped(api).value("naiad_openai_triton_metrics_up") == 1, 60)
    assert scraped(api).value("vllm:request_success_total", **ended) > before


def test_a_load_balancer_is_told_the_load(api: Server) -> None:
    name = json.loads(post(api, "/v1/models", b"", "GET")[2])["data"][0]["id"]
    body = {"model": name, "prompt": "Hello", "max_tokens": 2}
    headers = {"Content-Type": "application/json", "endpoint-load-metrics-format": "json"}
    connection = connect(api)
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    kind, _, report = answer.headers["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON"
    caches = [dict(labels) for _, labels in scraped(api).families["vllm:cache_config_info"].samples]
    expected = sum(int(each["block_size"]) * int(each["num_gpu_blocks"]) for each in caches)
    assert json.loads(report)["named_metrics"]["max_token_capacity"] == expected
