"""Requests to the vLLM backend's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import LIMITS, FakeSource
from helpers.vllm_requests import make_reader, params, read, source
from naiad.config.probe import PROBE_REQUEST_ID
from naiad.errors import InvalidRequestError
from naiad.frontend.request import StopRequest
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.vllm import VLLMRequestReader

MESSAGES = '[{"role": "user", "content": "Hi"}]'


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> VLLMRequestReader:
    return make_reader(tokenizer)


def test_vllms_defaults_hold(reader: VLLMRequestReader) -> None:
    request = read(reader)
    (row,) = request.rows
    made = row.params
    assert (made.max_tokens, made.temperature, made.top_p, made.top_k) == (16, 1, 1, 0)
    assert (request.streaming, request.exclude_input, request.prompt_text) == (False, True, "The quick")


FULL: dict[str, Any] = {
    "n": 2,
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "stop": ["END"],
    "stop_token_ids": [5],
    "bad_words": ["fox"],
    "allowed_token_ids": [6, 7],
    "logit_bias": {"8": 1.5},
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 3,
    "priority": 2,
}


def test_every_parameter_arrives(reader: VLLMRequestReader) -> None:
    request = read(reader, FULL)
    (row,) = request.rows
    made = row.params
    assert (made.max_tokens, made.min_tokens, made.seed, made.priority) == (9, 2, 7, 2)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.5, 0.9, 5, 0.1)
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (made.stop_token_ids, made.allowed_token_ids, made.logit_bias) == ((5,), (6, 7), ((8, 1.5),))
    assert (made.num_log_probs, request.num_log_probs) == (3, 3)
    assert len(made.bad_words) == 2
    assert row.text is not None
    assert (row.text.stop_strings, row.text.includes_stop_string) == (("END",), True)
    assert (request.outputs.num_return_sequences, request.joins_sequences) == (2, True)


def test_values_may_be_strings(reader: VLLMRequestReader) -> None:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in FULL.items()}
    assert read(reader, texts) == read(reader, FULL)


def test_one_stop_string_needs_no_list(reader: VLLMRequestReader) -> None:
    row = read(reader, {"stop": "END"}).rows[0]
    assert row.text is not None
    assert row.text.stop_strings == ("END",)


@pytest.mark.parametrize("sampling", [{}, "", {"seed": -1, "top_k": -1, "stop": None, "stop_token_ids": []}])
def test_nothing_is_asked_for(reader: VLLMRequestReader, sampling: Any) -> None:
    made = params(reader, sampling)
    assert (made.max_tokens, made.top_k, made.stop_token_ids) == (16, 0, params(reader, None).stop_token_ids)


def test_no_limit_means_the_window(reader: VLLMRequestReader) -> None:
    row = read(reader, {"max_tokens": None}).rows[0]
    assert row.params.max_tokens == LIMITS.max_model_len - len(row.prompt_token_ids)


def test_request_parameters_are_sampling_parameters(reader: VLLMRequestReader) -> None:
    (row,) = read(reader, None, {"temperature": 0.25, "max_tokens": 3, "stop": "END"}).rows
    assert (row.params.temperature, row.params.max_tokens) == (0.25, 3)
    assert row.text is not None
    assert row.text.stop_strings == ("END",)


def test_the_object_wins_over_parameters(reader: VLLMRequestReader) -> None:
    assert read(reader, {"max_tokens": 4}, {"max_tokens": 3}).rows[0].params.max_tokens == 4


def test_greedy_is_temperature_0_or_top_k_1(reader: VLLMRequestReader) -> None:
    assert params(reader, {"temperature": 0}).temperature == 0
    assert params(reader, {"top_k": 1}).temperature == 0


REFUSALS: list[tuple[Any, str]] = [
    ("{", "sampling_parameters is not JSON"),
    ("[]", "sampling_parameters: expected a JSON object"),
    ({"surprise": 1}, "unknown key 'surprise'"),
    ({"temperature": "hot"}, "temperature = 'hot': expected a number"),
    ({"temperature": -1}, "temperature = -1.0"),
    ({"temperature": "nan"}, "temperature = nan"),
    ({"top_p": 0}, "top_p = 0: expected a number > 0 and ≤ 1"),
    ({"top_p": 1.5}, "top_p = 1.5"),
    ({"top_k": -2}, "top_k = -2"),
    ({"max_tokens": 0}, "max_tokens = 0"),
    ({"max_tokens": True}, "max_tokens = True: expected a whole number"),
    ({"max_tokens": 1.5}, "max_tokens = 1.5: expected a whole number"),
    ({"seed": 2**64}, "seed = "),
    ({"n": 17}, "n = 17"),
    ({"best_of": 2}, "best_of = 2: expected n = 1"),
    ({"stop": [1]}, "stop = 1"),
    ({"stop": ["s"] * 65}, "stop has 65 entries"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids holds"),
    ({"stop_token_ids": "x"}, "stop_token_ids = 'x': expected a list of token ids"),
    ({"logit_bias": {"8": 1e9}}, "logit_bias holds"),
    ({"logit_bias": [1]}, "logit_bias = "),
    ({"logprobs": 21}, "logprobs = 21"),
    ({"ignore_eos": "maybe"}, "ignore_eos = 'maybe': expected true or false"),
    ({"prompt_logprobs": 1}, "prompt_logprobs = 1 is not supported"),
    ({"guided_decoding": {"structural_tag": "{}"}}, "guided_decoding.structural_tag.structures = "),
    ({"structured_outputs": '["regex"]'}, "structured_outputs = "),
    ({"lora_name": "alpaca"}, "lora_name = 'alpaca' is not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens = False is not supported"),
    ({"use_beam_search": True}, "use_beam_search = True is not supported"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens = 4 is not supported"),
    ("[" * 100_000, "sampling_parameters is not JSON"),
    ({"ignore_eos": "[" * 100_000}, "ignore_eos = '[[["),
    ({"use_beam_search": "[" * 100_000}, "use_beam_search = '[[["),
    ({"stop_token_ids": "[" * 100_000}, "stop_token_ids = '[[["),
    ('{"temperature": 1' + "0" * 400 + "}", "temperature = 1000"),
    ('{"max_tokens": 1' + "0" * 400 + "}", "max_tokens = 1000"),
    ('{"max_tokens": 1' + "0" * 5000 + "}", "sampling_parameters is not JSON: Integer value out of range"),
    ({"max_tokens": "1" + "0" * 5000}, "max_tokens = '1000"),
    ('{"seed": -1' + "0" * 400 + "}", "seed = -1000"),
    ('{"logit_bias": {"8": 1' + "0" * 400 + "}}", "logit_bias = 1000"),
    ({"logit_bias": {"9" * 400: 1}}, "logit_bias"),
    ({"allowed_token_ids": [10**400]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("sampling", "message"), REFUSALS, ids=[case[1][:60] for case in REFUSALS])
def test_what_is_wrong_is_named(reader: VLLMRequestReader, sampling: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        reader.read(source(sampling), LIMITS)
    assert message in str(refused.value)
    assert not {"num_return_sequences", "stop_words", "num_log_probs"} & set(str(refused.value).split())


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("[INST]", ("[INST]",)),
        ("[", ("[",)),
        ("[1, 2]", ("[1, 2]",)),
        ('["a", "[b"]', ("a", "[b")),
        ("[]", ()),
        ("null", ("null",)),
    ],
)
def test_a_text_that_is_no_list_is_a_stop_word(
    reader: VLLMRequestReader, stop: str, words: tuple[str, ...]
) -> None:
    (row,) = read(reader, {"stop": stop}).rows
    assert row.text is not None
    assert row.text.stop_strings == words


def test_values_that_ask_for_nothing_are_accepted(reader: VLLMRequestReader) -> None:
    off = {"detokenize": True, "skip_special_tokens": "true", "lora_name": "", "prompt_logprobs": None}
    assert read(reader, off | {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1}).rows


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"image": "aGk="}, "image is not supported"),
        ({"embedding_request": "{}"}, "embedding_request is not supported"),
        (
            {"stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        ({"messages": MESSAGES}, "either text_input or messages"),
        ({"text_input": None}, "either text_input or messages"),
    ],
)
def test_invalid_tensors_are_named(reader: VLLMRequestReader, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        reader.read(source(**tensors), LIMITS)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["surprise", "beam_width", "num_return_sequences"])
def test_a_parameter_without_meaning_here_is_refused(reader: VLLMRequestReader, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown parameter '{name}'"):
        reader.read(source(None, {name: 2}), LIMITS)


def test_half_a_character_is_no_stop_string(reader: VLLMRequestReader) -> None:
    with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
        reader.read(source(None, {"stop": "\ud800"}), LIMITS)


def test_several_sequences_do_not_stream(reader: VLLMRequestReader) -> None:
    with pytest.raises(InvalidRequestError, match="n = 2: expected 1 with stream = true"):
        reader.read(source({"n": 2}, stream=True), LIMITS)


def test_fields_of_the_text_level_are_served(reader: VLLMRequestReader) -> None:
    numbers = {"priority": np.int32(3), "num_draft_tokens": np.int32(0)}
    request = read(reader, cache_salt="tenant", **numbers)
    (row,) = request.rows
    assert (row.cache_salt, row.params.priority, row.params.num_draft_tokens) == ("tenant", 3, 0)


def test_messages_are_echoed_as_they_are_rendered(reader: VLLMRequestReader) -> None:
    request = read(reader, text_input=None, messages=MESSAGES)
    assert (request.prompt_text, request.exclude_input) == ("", False)


def test_a_probe_reaches_no_engine(reader: VLLMRequestReader) -> None:
    probe = FakeSource({}, request_id=PROBE_REQUEST_ID)
    assert reader.read(probe, LIMITS) == StopRequest(PROBE_REQUEST_ID)


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_url_input", "x"), ("lora_task_id", 5), ("draft_acceptance_threshold", 0.5)],
)
def test_parameters_that_are_not_served_are_refused_by_name(
    reader: VLLMRequestReader, name: str, value: Any
) -> None:
    prompt = np.array([b"The quick"], dtype=np.object_)
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported by this version of Naiad"):
        reader.read(FakeSource({"text_input": prompt}, {name: value}), LIMITS)


def test_parameters_that_are_not_served_may_be_switched_off(reader: VLLMRequestReader) -> None:
    prompt = np.array([b"The quick"], dtype=np.object_)
    assert not isinstance(
        reader.read(FakeSource({"text_input": prompt}, {"lora_task_id": 0}), LIMITS), StopRequest
    )
