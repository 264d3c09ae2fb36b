"""After many different concurrent requests, every counter has the value that the clients have counted."""

from __future__ import annotations

import random
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Leaving, Server, eventually, reached, running, settled
from helpers.tiny_repository import create_repository, tiny_checkpoint

KINDS = ("length", "stop", "string", "refused", "cancelled", "timeout", "beams")
REQUESTED = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout"}
Metrics = Counter[tuple[str, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """A server with few slots and a short queue, so that requests wait, lose their slots or are refused."""
    folder = tmp_path_factory.mktemp("counted_traffic")
    limits = ("--max-num-seqs", "8", "--max-queued-requests", "24")
    create_repository(folder / "repository", tiny_checkpoint(folder / "checkpoint"), *limits)
    with running(leaving, folder / "repository") as server:
        yield server


@dataclass(frozen=True)
class Asked:
    """One request, drawn by its number."""

    kind: str
    model: str
    num_sequences: int
    inputs: dict[str, Any]
    request: dict[str, Any]

    @property
    def label(self) -> str:
        """The model label of its metrics."""
        return "text" if self.model == "text" else "llm"


def draw(number: int) -> Asked:
    rng = random.Random(number)
    kind, model = rng.choice(KINDS), rng.choice(["llm", "ensemble", "text"])
    num_sequences = rng.choice([1, 1, 2, 3])
    num_tokens = ENDLESS if kind in ("cancelled", "timeout") else rng.randrange(1, 40)
    if model == "llm":
        inputs = llm_inputs([rng.randrange(5, 200) for _ in range(rng.randrange(1, 150))], num_tokens)
        inputs["streaming"] = kind != "beams" and rng.random() < 0.5
    else:
        inputs = text_inputs("The quick brown fox " * rng.randrange(1, 20), num_tokens)
        inputs["stream"] = kind != "beams" and rng.random() < 0.5
    fields: dict[str, Any] = REQUESTED | {"num_return_sequences": num_sequences, "ignore_eos": kind != "stop"}
    fields["seed"] = np.array([[number]], dtype=np.uint64)
    if kind == "beams":
        fields |= {"beam_width": num_sequences + 1, "num_return_sequences": num_sequences + 1}
    else:
        fields["temperature"] = -1.0 if kind == "refused" else 3.0
    if kind == "stop":
        fields["stop_token_ids"] = rng.sample(range(5, 200), 30)
    if kind == "string" and model != "llm":
        fields["stop_words"] = ["e", "qu"]
    request = {"request_id": f"request {number}"} | ({"timeout": 250_000} if kind == "timeout" else {})
    return Asked(kind, model, num_sequences, inputs | fields, request)


def run(server: Server, number: int) -> tuple[Asked, Outcome]:
    asked = draw(number)
    stream = Stream(server.grpc, asked.model, asked.inputs, **asked.request)
    if asked.kind == "cancelled":
        stream.got_response.wait(0.1)
        while not stream.has_ended:
            ask(server.grpc, "llm", llm_inputs([1], 1, stop=True), **asked.request)
            stream.got_response.wait(0.05)
    return asked, stream.join(60)


def seen(asked: Asked, outcome: Outcome) -> Metrics:
    """What a request adds to the metrics: (name, model, finished_reason) → value."""
    label, found = asked.label, Metrics()
    assert (outcome.num_finals, outcome.call_error) == (1, "")
    if outcome.errors:
        (error,) = outcome.errors
        assert asked.kind == "refused" or "the queue is full" in error or "timeout: " in error, error
        if "timeout: " in error:
            num_waited = 1 if asked.kind == "beams" else asked.num_sequences
            found["vllm:request_success_total", label, "timeout"] = num_waited
        return found
    tokens: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for response in outcome.responses:
        index = int(response.get("sequence_index", np.array(0)).item())
        tokens[index] += int(response["num_output_tokens"].item())
        reasons[index] = response["finish_reason"].item().decode() or reasons.get(index, "")
    num_prompt_tokens = int(outcome.responses[0]["num_input_tokens"].item())
    for index, reason in reasons.items():
        found["vllm:request_success_total", label, REASONS[reason]] += 1
        # A sequence that ended before its first token is not observed.
        if tokens[index] or reason in ("stop", "length"):
            observe(found, label, num_prompt_tokens, tokens[index])
            if index == 0:
                found["vllm:request_params_n_count", label, ""] += 1
                num_asked = asked.inputs["num_return_sequences"]
                found["vllm:request_params_n_sum", label, ""] += num_asked
        found["vllm:time_to_first_token_seconds_count", label, ""] += tokens[index] > 0
    return found


def observe(found: Metrics, label: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
    for name in ("vllm:request_prompt_tokens", "nv_llm_input_token_len"):
        found[f"{name}_count", label, ""] += 1
        found[f"{name}_sum", label, ""] += num_prompt_tokens
    for name in ("vllm:request_generation_tokens", "nv_llm_output_token_len"):
        found[f"{name}_count", label, ""] += 1
        found[f"{name}_sum", label, ""] += num_output_tokens
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        found[f"vllm:{name}_seconds_count", label, ""] += 1
    found["vllm:prompt_tokens_total", "llm", ""] += num_prompt_tokens
    found["vllm:generation_tokens_total", "llm", ""] += num_output_tokens


def metrics_of(server: Server) -> Metrics:
    """The values on the metrics port, once they no longer change."""
    return settled(lambda: metrics_now(server))


def metrics_now(server: Server) -> Metrics:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = Metrics()
    for name, labels, value in re.findall(
        r"^((?:vllm:|nv_llm_)\w+_(?:total|count|sum))\{(.*)\} (\S+)$", text, re.MULTILINE
    ):
        known = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if "le" not in known and "position" not in known:
            found[name, known["model"], known.get("finished_reason", "")] = round(float(value))
    return found


def assert_sums_agree(metrics: Metrics) -> None:
    for kind in ("prompt_tokens", "generation_tokens"):
        parts = [metrics[f"vllm:request_{kind}_sum", model, ""] for model in ("llm", "text")]
        assert metrics[f"vllm:{kind}_total", "llm", ""] == sum(parts)


@pytest.mark.parametrize("num_requests", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_counters_are_the_clients_counts(tiny: Server, num_requests: int) -> None:
    before = metrics_of(tiny)
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda number: run(tiny, number), range(num_requests)))
    expected = Metrics()
    for asked, outcome in done:
        expected.update(seen(asked, outcome))

    def reported() -> Metrics:
        now = metrics_now(tiny)
        return Metrics({key: now[key] - before[key] for key in expected})

    assert reached(reported, expected) == expected
    assert_sums_agree(metrics_of(tiny))
    ends = [key[2] for key, value in expected.items() if key[2] and value]
    assert set(ends) == set(REASONS.values())
    print(Counter(asked.kind for asked, _ in done), dict(expected))


def test_requests_of_clients_that_go_away_count_the_generated_tokens(tiny: Server) -> None:
    before = metrics_of(tiny)
    streams = [
        Stream(tiny.grpc, "ensemble", text_inputs("The quick", ENDLESS, ignore_eos=True)) for _ in range(8)
    ]
    for number, stream in enumerate(streams):
        assert stream.got_response.wait(60)
        stream.got_response.wait(number / 50)
        stream.cancel()
    num_seen = sum(len(stream.join().responses) for stream in streams)
    key = ("vllm:request_success_total", "llm", "abort")
    eventually(lambda: metrics_now(tiny)[key] == before[key] + 8)
    after = metrics_of(tiny)
    assert_sums_agree(after)
    assert after[key] == before[key] + 8
    key = ("vllm:generation_tokens_total", "llm", "")
    assert num_seen <= after[key] - before[key] < 8 * ENDLESS


def test_counters_continue_when_the_engine_is_killed(tiny: Server) -> None:
    stream = Stream(tiny.grpc, "llm", llm_inputs([5, 6, 7], ENDLESS, ignore_eos=True))
    assert stream.got_response.wait(60)
    before = metrics_now(tiny)
    tiny.processes("naiad.engine_process")[0].kill()
    outcome = stream.join(30)
    assert (len(outcome.errors), outcome.num_finals) == (1, 1)
    ends = ("vllm:request_success_total", "llm", "error")
    eventually(lambda: metrics_now(tiny)[ends] == before[ends] + 1)
    # Before the next request is answered no total has decreased.
    lost = metrics_of(tiny)
    assert all(lost[key] >= value for key, value in before.items())
    assert lost[ends] == before[ends] + 1
    # Requests are refused until the new engine is up.
    eventually(lambda: not ask(tiny.grpc, "llm", llm_inputs([5, 6], 9, ignore_eos=True)).errors)
    assert tiny.metric("nv_trt_llm_request_metrics", request_type="max") == 8
    key = ("vllm:generation_tokens_total", "llm", "")
    assert reached(lambda: metrics_now(tiny)[key], lost[key] + 9) == lost[key] + 9
