"""Words, salts, priorities and several sequences, through the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.raw_grpc import Stream, ask, llm_inputs, text_inputs
from helpers.served import WAYS, served
from helpers.server import Server, eventually

VOCABULARY = 49152
PROMPT = "The capital of France is"
RANDOM = {"temperature": 0.9, "top_p": 1.0, "seed": np.array([[3]], dtype=np.uint64)}


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: AutoTokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(PROMPT)
    return ids


def text(server: Server, **fields: Any) -> str:
    outcome = ask(server.grpc, "ensemble", text_inputs(PROMPT, 8) | fields)
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    return outcome.text


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True, **fields}
    status, answer = server.post("/v2/models/ensemble/generate_stream", body)
    assert status == 200, answer
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]


def num_active(server: Server) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type="active")


def test_min_p_as_a_parameter(server: Server) -> None:
    outcome = ask(server.grpc, "ensemble", text_inputs(PROMPT, 8, temperature=5.0), parameters={"min_p": 1.0})
    assert outcome.text == text(server)


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_word_is_not_written(server: Server, tokenizer: AutoTokenizer, way: str) -> None:
    word = text(server).split()[0]
    assert text(server).startswith(" " + word)
    without = served(server, way, PROMPT, bad_words=[word, ""]).text
    assert tokenizer.encode(" " + word)[-1] not in tokenizer.encode(without)
    assert without != text(server)
    assert served(server, way, PROMPT, bad_words=word).text == without


@pytest.mark.parametrize("way", WAYS)
def test_biased_words_are_written_instead(server: Server, way: str) -> None:
    dogs = {"embedding_bias_words": [" dog"], "embedding_bias_weights": [100.0], "max_tokens": 3}
    assert served(server, way, PROMPT, **dogs).text == " dog dog dog"
    no_bias = {"embedding_bias_words": [" dog"], "embedding_bias_weights": [0.0]}
    assert served(server, way, PROMPT, **no_bias).text == text(server)


def test_biases_of_ids_and_of_the_vocabulary_are_one(server: Server, prompt_ids: list[int]) -> None:
    pairs = {"logit_bias_ids": [77, 77], "logit_bias_values": [60.0, 40.0]}
    dense = np.zeros((1, VOCABULARY), dtype=np.float32)
    dense[0, 77] = 100.0
    for bias in (pairs, {"embedding_bias": dense}):
        assert ask(server.grpc, "llm", llm_inputs(prompt_ids, 3, **bias)).token_ids == [77] * 3
    assert (
        ask(server.grpc, "llm", llm_inputs(prompt_ids, 3, **pairs, embedding_bias=-dense)).token_ids
        != [77] * 3
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_string_may_be_part_of_the_text(server: Server, way: str) -> None:
    whole = text(server)
    stop = whole[4:9]
    end = whole.index(stop)
    assert served(server, way, PROMPT, stop_words=[stop]).text == whole[:end]
    answer = served(server, way, PROMPT, stop_words=[stop], include_stop_str_in_output=True)
    assert answer.text == whole[: end + len(stop)]


@pytest.mark.parametrize("way", WAYS)
def test_prompts_are_shared_within_a_salt_only(server: Server, way: str) -> None:
    prompt = f"Once upon a time {way} met a fox. " * 20

    def num_cached(salt: str) -> int:
        answer = served(server, way, prompt, max_tokens=2, cache_salt=salt, return_num_cached_tokens=True)
        return int(answer.end("num_cached_tokens"))

    assert num_cached("salt of one") == 0
    assert num_cached("salt of another") == 0
    assert num_cached("salt of one") >= 64


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("priority", [-100, 100])
def test_priority_changes_no_text(server: Server, way: str, priority: int) -> None:
    assert served(server, way, PROMPT, priority=priority).text == text(server)


@pytest.mark.parametrize("stream", [True, False])
def test_sequences_of_one_prompt(server: Server, stream: bool) -> None:
    requested = {"return_num_output_tokens": True, "return_finish_reason": True, "stream": stream}
    inputs = text_inputs(PROMPT, 8, **RANDOM) | {"num_return_sequences": 4, "ignore_eos": True, **requested}
    outcome = ask(server.grpc, "ensemble", inputs)
    texts, counts = [b""] * 4, [0] * 4
    for response in outcome.responses:
        place = response["sequence_index"].item()
        texts[place] += response["text_output"].reshape(-1)[0]
        counts[place] += response["num_output_tokens"].item()
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert counts == [8] * 4
    assert len(set(texts)) == 4
    assert texts[0].decode() == text(server, **RANDOM, ignore_eos=True)
    if not stream:
        assert len(outcome.responses) == 4


def test_sequences_of_several_prompts(server: Server, prompt_ids: list[int]) -> None:
    inputs = llm_inputs(prompt_ids, 4, num_return_sequences=2, streaming=False)
    doubled = {
        name: np.repeat(np.array([value if isinstance(value, list) else [value]]), 2, axis=0)
        for name, value in inputs.items()
    }
    doubled = {
        name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in doubled.items()
    }
    outcome = ask(server.grpc, "llm", doubled)
    places = [(r["batch_index"].item(), r["sequence_index"].item()) for r in outcome.responses]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert outcome.num_finals == 1


def test_sequences_over_http(server: Server) -> None:
    answers = events(server, num_return_sequences=3, temperature=0.9, top_p=1.0, seed=5, stream=False)
    assert sorted(answer["sequence_index"] for answer in answers) == [0, 1, 2]
    streamed = events(server, num_return_sequences=3, temperature=0.9, top_p=1.0, seed=5, stream=True)
    texts = ["", "", ""]
    for piece in streamed:
        texts[piece["sequence_index"]] += piece["text_output"]
    assert texts == [a["text_output"] for a in sorted(answers, key=lambda a: int(a["sequence_index"]))]


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_a_cancel_ends_all_sequences(server: Server, prompt_ids: list[int], model: str) -> None:
    more = {"num_return_sequences": 4, "ignore_eos": True}
    inputs = llm_inputs(prompt_ids, 1500, **more) if model == "llm" else text_inputs(PROMPT, 1500, **more)
    stream = Stream(server.grpc, model, inputs)
    assert stream.got_response.wait(60)
    eventually(lambda: num_active(server) == 4)
    stream.cancel()
    eventually(lambda: num_active(server) == 0)
    eventually(lambda: server.used_blocks() == 0)
    stream.join()


def test_stop_ends_all_sequences_with_one_final(server: Server, prompt_ids: list[int]) -> None:
    more = {"num_return_sequences": 4, "ignore_eos": True, "return_finish_reason": True}
    stream = Stream(server.grpc, "ensemble", text_inputs(PROMPT, 1500, **more), request_id="siblings")
    assert stream.got_response.wait(60)
    ask(server.grpc, "llm", llm_inputs(prompt_ids, 1, stop=True), request_id="siblings")
    outcome = stream.join()
    ends = {
        response["sequence_index"].item(): response["finish_reason"].item()
        for response in outcome.responses
        if response["finish_reason"].item()
    }
    assert ends == dict.fromkeys(range(4), b"cancelled")
    assert (outcome.errors, outcome.num_finals) == ([], 1)
