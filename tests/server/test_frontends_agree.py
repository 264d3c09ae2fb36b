"""All frontends answer a request alike: ensemble, its steps, text, vLLM's model, HTTP and unary models."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import pytest
import tritonclient.grpc as triton

from helpers.contract_page import page_rows
from helpers.frontend_calls import (
    DRAFTED,
    INDICES,
    OF_THE_MOMENT,
    OUTPUTS,
    VLLM_OUTPUTS,
    Answers,
    by_call,
    by_http,
    by_steps,
    by_stream,
    by_vllm,
    close,
    goes_to_vllm,
)
from helpers.frontend_requests import (
    LABELS,
    ONLY_TENSORS,
    SCALARS,
    SPECIAL_TOKENS,
    WORD_LISTS,
    Request,
    draw,
)
from helpers.server import Leaving, Server, running
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint

Way = Callable[[], Answers]
ENDPOINTS = (("generate", False), ("generate_stream", False), ("generate_stream", True))
FRONTENDS = ("ensemble", "text")
VLLM = ("vllm_model", "vllm_model streamed")
UNARY = ("unary_ensemble", "unary_text")
# Each call sends `stream` itself.
FIELDS = {row.name for row in page_rows("ensemble") if not row.is_output and row.status == "served"} - {
    "stream"
}


@pytest.fixture(scope="module")
def frontends(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """A repository of all models, with the vLLM backend's model for the same engine, and unary models."""
    folder = tmp_path_factory.mktemp("frontends_agree")
    checkpoint, repository = tiny_checkpoint(folder / "checkpoint"), folder / "repository"
    create_repository(repository, checkpoint, "--drafter", "ngram")
    create_repository(folder / "vllm", checkpoint, "--preset", "vllm")
    shutil.copytree(folder / "vllm" / "vllm_model", repository / "vllm_model")
    add_to_repository(repository, checkpoint, "unary", "--no-decoupled")
    with running(leaving, repository) as server:
        yield server


@pytest.fixture(scope="module")
def steps(frontends: Server) -> list[dict[str, Any]]:
    """The ensemble's steps, from its configuration."""
    with triton.InferenceServerClient(frontends.grpc) as client:
        config = client.get_model_config("ensemble", as_json=True)["config"]
    found: list[dict[str, Any]] = config["ensemble_scheduling"]["step"]
    return found


def ways_of(server: Server, steps: list[dict[str, Any]], request: Request) -> dict[str, Way]:
    """Name → call. Similar calls take turns; the names of streaming ones end with "streamed"."""
    rng, grpc = random.Random(request.number), partial(by_stream, server)
    ways: dict[str, Way] = {"text": partial(grpc, "text", request, False, by_parameters=True)}
    if not request.has_beams:
        ways["ensemble streamed"] = partial(grpc, "ensemble", request, True, by_parameters=True)
        ways["text streamed"] = partial(grpc, "text", request, True, by_parameters=False)
    by_turns: list[dict[str, Way]] = [
        {"steps": partial(by_steps, server, steps, request, False)},
        unary_ways(server, request),
        *(json_ways(server, request, model) for model in FRONTENDS),
        vllm_ways(server, request),
    ]
    if not request.has_beams:
        by_turns[0]["steps streamed"] = partial(by_steps, server, steps, request, True)
    for group in by_turns:
        ways |= rng.sample(sorted(group.items()), min(1, len(group)))
    return ways


def unary_ways(server: Server, request: Request) -> dict[str, Way]:
    if request.num_sequences > 1:
        return {}
    calls: dict[str, Way] = {
        f"unary_{model}": partial(by_call, server, f"unary_{model}", request)
        for model in ("ensemble", "text")
    }
    return calls | {
        f"{model} by generate": partial(by_http, server, model, "generate", request, False) for model in calls
    }


def json_ways(server: Server, request: Request, model: str) -> dict[str, Way]:
    return {
        f"{model} by {endpoint}{' streamed' * stream}": partial(
            by_http, server, model, endpoint, request, stream
        )
        for endpoint, stream in ENDPOINTS
        if not (stream and request.has_beams) and (request.num_sequences == 1 or endpoint != "generate")
    }


def vllm_ways(server: Server, request: Request) -> dict[str, Way]:
    if not goes_to_vllm(request):
        return {}
    ways: dict[str, Way] = {"vllm_model": partial(by_vllm, server, request, False)}
    if request.num_sequences == 1 and request.first.get("exclude_input_in_output") is not False:
        ways["vllm_model streamed"] = partial(by_vllm, server, request, True)
    return ways


def promised(request: Request, row: int) -> set[str]:
    """The outputs that the request asks for of every sequence of a row."""
    names = {"text_output"} | {name.removeprefix("return_") for name in request.first} & OUTPUTS
    if "return_finish_reason" in request.first:
        names |= {"stop_reason"}
    if "return_log_probs" in request.first:
        names |= {"output_log_probs", "cum_log_probs"}
    if request.first.get("num_log_probs"):
        names |= {"top_log_prob_ids", "top_log_probs"}
    if "return_perf_metrics" in request.first:
        names |= OF_THE_MOMENT - {"num_cached_tokens"}
    if request.rows[row].get("num_draft_tokens"):
        names |= DRAFTED
    return names


def check_expected(request: Request, expected: Answers) -> None:
    sequences = range(request.num_sequences)
    assert set(expected) == {(row, each) for row in range(len(request.rows)) for each in sequences}
    for (row, sequence), answer in expected.items():
        names = promised(request, row) - ({"context_logits"} if sequence else set())
        if not sum(answer.get("num_output_tokens", [])):
            # An answer that ends with its first token may have no new tokens, and then has no logits of them.
            names -= {"generation_logits"} - answer.keys()
        assert answer.keys() == names
        assert len(answer["text_output"]) == request.num_texts


def without_prompts(request: Request, expected: Answers, streamed: Answers) -> Answers:
    """The answers as they are streamed: without the prompt's text, which all texts of a row begin with."""
    prompts: dict[int, str] = {}
    found: Answers = {}
    for (row, sequence), answer in expected.items():
        (text,) = answer["text_output"]
        (new,) = streamed[row, sequence]["text_output"]
        prompt = prompts.setdefault(row, text.removesuffix(new))
        assert text == prompt + new
        assert (prompt != "") == request.has_echo
        if request.has_echo and "text_input" in request.rows[row]:
            assert prompt == decoded(request.rows[row]["text_input"])
        found[row, sequence] = answer | {"text_output": [new]}
    return found


def decoded(prompt: str) -> str:
    return reduce(lambda text, token: text.replace(token, ""), SPECIAL_TOKENS, prompt)


def with_prompts_as_sent(request: Request, expected: Answers) -> Answers:
    """The answers with the prompts as sent, as the vLLM backend's model has them: special tokens stay."""
    found = dict(expected)
    for row, fields in enumerate(request.rows):
        for sequence in range(request.num_sequences if request.has_echo and "text_input" in fields else 0):
            answer, sent = expected[row, sequence], fields["text_input"]
            new = answer["text_output"][0].removeprefix(decoded(sent))
            found[row, sequence] = answer | {"text_output": [sent + new]}
    return found


def check(way: str, found: Answers, expected: Answers) -> None:
    names = VLLM_OUTPUTS if way.startswith("vllm") else OUTPUTS
    assert found.keys() == expected.keys(), way
    for key, answer in expected.items():
        promise = names & answer.keys()
        assert found[key].keys() == promise, (way, key)
        for name in promise - OF_THE_MOMENT:
            assert close(found[key][name], answer[name]), (way, key, name, found[key][name], answer[name])


def compared(server: Server, steps: list[dict[str, Any]], request: Request) -> set[str]:
    """Compare the first call with all others, which run at once; return what the request covered."""
    expected = by_stream(server, "ensemble", request, False, by_parameters=False)
    check_expected(request, expected)
    ways = ways_of(server, steps, request)
    with ThreadPoolExecutor() as pool:
        found = dict(zip(ways, pool.map(lambda way: way(), ways.values()), strict=True))
    streamed, in_vllm = expected, with_prompts_as_sent(request, expected)
    if not request.has_beams:
        streamed = without_prompts(request, expected, found["ensemble streamed"])
    covered = request.labels() | {name for answer in expected.values() for name in answer}
    for way, answers in found.items():
        unstreamed = in_vllm if way == "vllm_model" else expected
        check(way, answers, streamed if way.endswith("streamed") else unstreamed)
        covered |= {way} | {f"{name} of {way}" for each in answers.values() for name in each if way in VLLM}
    return covered


def wanted(num_requests: int) -> set[str]:
    """What the requests must have covered; with many requests also each field as a parameter."""
    names = {
        f"{model} by {endpoint}{' streamed' * stream}"
        for model in FRONTENDS
        for endpoint, stream in ENDPOINTS
    }
    names |= {f"{model}{how}" for model in UNARY for how in ("", " by generate")}
    names |= {"text", "steps", "vllm_model"} | {
        f"{name} streamed" for name in ("steps", *FRONTENDS, "vllm_model")
    }
    names |= FIELDS | LABELS | OUTPUTS - set(INDICES)
    if num_requests >= 200:
        names |= {f"{name} as parameter" for name in (SCALARS & FIELDS) - ONLY_TENSORS | set(WORD_LISTS)}
        names |= {f"{name} of {way}" for way in VLLM for name in VLLM_OUTPUTS}
    return names


@pytest.mark.parametrize("num_requests", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_every_frontend_gives_the_same_answer(
    frontends: Server, steps: list[dict[str, Any]], num_requests: int
) -> None:
    covered: Counter[str] = Counter()
    for number in range(num_requests):
        request = draw(number)
        print(request)
        covered.update(compared(frontends, steps, request))
    print(f"{num_requests} requests: {dict(sorted(covered.items()))}")
    assert wanted(num_requests) - covered.keys() == set()
