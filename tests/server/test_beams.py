"""Beam search through the real server, against `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from helpers.raw_grpc import ENDLESS, Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually

PROMPT = "1, 2, 3, 4,"
OTHER = "The quick brown"
MAX_TOKENS = 10
# They end some beams early.
STOP_IDS = (42, 128)
# Searches by the field names of `ensemble`; those of `llm` differ only in the penalty's name.
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 4},
    {"beam_width": 3, "length_penalty": 1.0, "early_stopping": False},
    {"beam_width": 2, "length_penalty": -2.0, "early_stopping": True},
]
FOR_ALL = {"return_log_probs": True, "return_finish_reason": True, "return_num_output_tokens": True}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_dir)


class Oracle:
    """The results of `transformers`; each search is run once."""

    def __init__(self, model_dir: Path, tokenizer: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._tokenizer = tokenizer
        self._found: dict[str, tuple[list[list[int]], list[float]]] = {}

    def search(self, prompt: str, search: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
        """The new ids of each beam, without the one that ended the text, and the scores."""
        key = prompt + json.dumps(search)
        if key not in self._found:
            self._found[key] = self._search(self._tokenizer.encode(prompt), search)
        return self._found[key]

    def _search(self, ids: list[int], search: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
        width = search["beam_width"]
        made = self._model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            generation_config=GenerationConfig(
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=MAX_TOKENS,
                length_penalty=search.get("length_penalty", 0.0),
                early_stopping=search.get("early_stopping", True),
                eos_token_id=[*STOP_IDS, self._tokenizer.eos_token_id],
                pad_token_id=self._tokenizer.eos_token_id,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            ),
        )
        ends = {*STOP_IDS, self._tokenizer.eos_token_id}
        beams = []
        for row in made.sequences[:, len(ids) :].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row))
            beams.append(row[:end])
        return beams, made.sequences_scores.tolist()


@pytest.fixture(scope="module")
def oracle(tiny_dir: Path, tokenizer: Any) -> Oracle:
    return Oracle(tiny_dir, tokenizer)


def text_of(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def beams_of(response: dict[str, Any]) -> list[list[int]]:
    """The ids of each beam, without padding."""
    rows, lengths = response["output_ids"][0].tolist(), response["sequence_length"][0].tolist()
    for row, length in zip(rows, lengths, strict=True):
        assert set(row[length:]) <= {-1}
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def only_response(outcome: Outcome) -> dict[str, Any]:
    assert (outcome.errors, outcome.num_finals, len(outcome.responses)) == ([], 1, 1)
    return outcome.responses[0]


def direct(prompt: list[int], **more: Any) -> dict[str, Any]:
    """Inputs of `llm`, which has another name for the penalty."""
    if "length_penalty" in more:
        more["len_penalty"] = more.pop("length_penalty")
    more = {"streaming": False, "stop_token_ids": list(STOP_IDS), **more}
    return llm_inputs(prompt, MAX_TOKENS, **more)


def texts(**more: Any) -> dict[str, Any]:
    return text_inputs(PROMPT, MAX_TOKENS, **{"stream": False, "stop_token_ids": list(STOP_IDS), **more})


@pytest.mark.parametrize("search", SEARCHES)
def test_tokens_and_scores_of_llm(
    tiny: Server, oracle: Oracle, tokenizer: Any, search: dict[str, Any]
) -> None:
    inputs = direct(tokenizer.encode(PROMPT), **search, **FOR_ALL)
    response = only_response(ask(tiny.grpc, "llm", inputs))
    beams, scores = oracle.search(PROMPT, search)
    assert beams_of(response) == beams
    assert response["cum_log_probs"][0].tolist() == pytest.approx(scores, abs=1e-3)
    assert response["num_output_tokens"].item() == sum(map(len, beams))
    assert response["finish_reason"].tolist() in ([[b"stop"]], [[b"length"]])
    width, longest = search["beam_width"], max(map(len, beams))
    assert response["output_log_probs"].shape == (1, width, longest)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("is_excluded", [True, False])
def test_texts_and_scores_of_the_ensemble(
    tiny: Server, oracle: Oracle, tokenizer: Any, search: dict[str, Any], is_excluded: bool
) -> None:
    inputs = texts(**search, **FOR_ALL, exclude_input_in_output=is_excluded)
    response = only_response(ask(tiny.grpc, "ensemble", inputs))
    beams, scores = oracle.search(PROMPT, search)
    said = [each.decode() for each in response["text_output"].tolist()]
    begin = "" if is_excluded else PROMPT
    assert said == [begin + text_of(tokenizer, beam) for beam in beams]
    assert response["text_output"].shape == (search["beam_width"],)
    assert response["cum_log_probs"][0].tolist() == pytest.approx(scores, abs=1e-3)


def test_log_probs_add_up_to_the_score(tiny: Server, tokenizer: Any) -> None:
    """Without a penalty, and without an end-of-text id that would be part of the score."""
    more = {"beam_width": 3, "return_log_probs": True, "ignore_eos": True, "stop_token_ids": []}
    response = only_response(ask(tiny.grpc, "llm", direct(tokenizer.encode(PROMPT), **more)))
    sums = response["output_log_probs"].sum(axis=2)
    np.testing.assert_allclose(response["cum_log_probs"], sums, atol=1e-4)
    assert (np.diff(sums[0]) <= 0).all()


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_http(tiny: Server, oracle: Oracle, tokenizer: Any, endpoint: str) -> None:
    search = SEARCHES[1]
    body = {"text_input": PROMPT, "max_tokens": MAX_TOKENS, "exclude_input_in_output": True}
    body |= {"stop_token_ids": list(STOP_IDS), "return_log_probs": True, **search}
    status, answer = tiny.post(f"/v2/models/ensemble/{endpoint}", body)
    assert status == 200, answer
    beams, scores = oracle.search(PROMPT, search)
    (event,) = answer.split("\n\n")[:1]
    decoded = json.loads(event.removeprefix("data: "))
    assert decoded["text_output"] == [text_of(tokenizer, beam) for beam in beams]
    assert decoded["cum_log_probs"] == pytest.approx(scores, abs=1e-3)


def test_http_to_llm(tiny: Server, oracle: Oracle, tokenizer: Any) -> None:
    inputs = direct(tokenizer.encode(PROMPT), **SEARCHES[0])
    status, answer = tiny.post("/v2/models/llm/generate", inputs)
    assert status == 200, answer
    beams, _ = oracle.search(PROMPT, SEARCHES[0])
    assert json.loads(answer)["sequence_length"] == [len(beam) for beam in beams]


def test_fewer_beams(tiny: Server, oracle: Oracle, tokenizer: Any) -> None:
    beams, _ = oracle.search(PROMPT, SEARCHES[0])
    inputs = texts(**SEARCHES[0], num_return_sequences=2)
    response = only_response(ask(tiny.grpc, "ensemble", inputs))
    assert [each.decode() for each in response["text_output"]] == [
        text_of(tokenizer, beam) for beam in beams[:2]
    ]
    best = only_response(
        ask(tiny.grpc, "llm", direct(tokenizer.encode(PROMPT), **SEARCHES[0], num_return_sequences=1))
    )
    assert beams_of(best) == beams[:1]


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_two_rows(tiny: Server, oracle: Oracle, tokenizer: Any, model: str) -> None:
    prompts, search = [PROMPT, OTHER], SEARCHES[1]
    if model == "llm":
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        rows = [direct(each + [0] * (max(map(len, ids)) - len(each)), **search) for each in ids]
        for row, each in zip(rows, ids, strict=True):
            row["input_lengths"] = len(each)
    else:
        rows = [texts(**search) | {"text_input": prompt} for prompt in prompts]
    outcome = ask(tiny.grpc, model, {name: stacked([row[name] for row in rows]) for name in rows[0]})
    assert (outcome.errors, outcome.num_finals, len(outcome.responses)) == ([], 1, 2)
    for response in outcome.responses:
        beams, _ = oracle.search(prompts[response["batch_index"].item()], search)
        if model == "llm":
            assert beams_of(response) == beams
        else:
            said = [each.decode() for each in response["text_output"]]
            assert said == [text_of(tokenizer, beam) for beam in beams]


def stacked(values: list[Any]) -> Any:
    """Stack the rows' values into one tensor [B, …]."""
    first = values[0][0] if isinstance(values[0], list) else values[0]
    if isinstance(first, str):
        return np.array([[value.encode()] for value in values], dtype=np.object_)
    kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(first)]
    return np.array([value if isinstance(value, list) else [value] for value in values], dtype=kind)


def test_a_stop_string_cuts_each_text(tiny: Server) -> None:
    whole = only_response(ask(tiny.grpc, "ensemble", texts(beam_width=3, stop_token_ids=[])))
    wholes = [each.decode() for each in whole["text_output"]]
    stop = wholes[0][8:10]
    for is_excluded, begin in ((True, ""), (False, PROMPT)):
        more = {"stop_words": [stop], "exclude_input_in_output": is_excluded, "stop_token_ids": []}
        inputs = texts(beam_width=3, return_finish_reason=True, **more)
        response = only_response(ask(tiny.grpc, "ensemble", inputs))
        said = [each.decode() for each in response["text_output"]]
        assert said == [begin + text.partition(stop)[0] for text in wholes]
        assert (response["finish_reason"].item(), response["stop_reason"].item()) == (b"stop", stop.encode())


def test_beams_beside_other_requests(tiny: Server, oracle: Oracle, tokenizer: Any) -> None:
    alone = ask(tiny.grpc, "ensemble", text_inputs(OTHER, 40)).text
    others = [Stream(tiny.grpc, "ensemble", text_inputs(OTHER, 40)) for _ in range(3)]
    searches = [Stream(tiny.grpc, "ensemble", texts(**SEARCHES[0])) for _ in range(3)]
    beams, _ = oracle.search(PROMPT, SEARCHES[0])
    for search in searches:
        said = only_response(search.join())["text_output"].tolist()
        assert [each.decode() for each in said] == [text_of(tokenizer, beam) for beam in beams]
    assert [other.join().text for other in others] == [alone] * 3


def test_streaming_is_refused_with_one_final(tiny: Server) -> None:
    outcome = ask(tiny.grpc, "ensemble", texts(beam_width=2) | {"stream": True})
    assert outcome.num_finals == 1
    assert outcome.responses == []
    assert "stream = True is not supported with beam_width = 2" in outcome.errors[0]


def is_idle(server: Server) -> bool:
    active = server.metric("nv_trt_llm_request_metrics", request_type="active")
    return active == 0 and server.used_blocks() == 0


def num_steps(tiny: Server) -> float:
    return tiny.metric("nv_trt_llm_general_metrics", general_type="iteration_counter")


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_a_client_that_goes_away_ends_the_search(tiny: Server, tokenizer: Any, model: str) -> None:
    more = {"beam_width": 4, "ignore_eos": True, "early_stopping": False}
    inputs = direct(tokenizer.encode(PROMPT)) if model == "llm" else texts()
    inputs |= more | {"request_output_len" if model == "llm" else "max_tokens": ENDLESS}
    eventually(lambda: is_idle(tiny))
    before = num_steps(tiny)
    stream = Stream(tiny.grpc, model, inputs)
    eventually(lambda: num_steps(tiny) > before + 5)
    stream.cancel()
    eventually(lambda: is_idle(tiny))
    stream.join()


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_stop_and_deadline_give_the_beams_so_far(tiny: Server, tokenizer: Any, model: str) -> None:
    long = {"beam_width": 4, "ignore_eos": True, "early_stopping": False, "return_finish_reason": True}
    long |= {"stop_token_ids": []}
    inputs = direct(tokenizer.encode(PROMPT)) if model == "llm" else texts()
    inputs |= long | {"request_output_len" if model == "llm" else "max_tokens": ENDLESS}
    eventually(lambda: is_idle(tiny))
    before = num_steps(tiny)
    stream = Stream(tiny.grpc, model, inputs, request_id="search")
    eventually(lambda: num_steps(tiny) > before + 5)
    ask(tiny.grpc, "llm", llm_inputs([5], 1, stop=True), request_id="search")
    ends = {b"cancelled": stream.join(), b"timeout": ask(tiny.grpc, model, inputs, timeout=500_000)}
    for reason, outcome in ends.items():
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        finals = [response for response in outcome.responses if "finish_reason" in response]
        assert [response["finish_reason"].item() for response in finals] == [reason]
        if model == "llm":
            assert finals[0]["output_ids"].shape[:2] == (1, 4)
        else:
            assert finals[0]["text_output"].shape == (4,)
    eventually(lambda: is_idle(tiny))
