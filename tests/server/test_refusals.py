"""Bad requests are refused by name and value, without effects on the engine or other requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.raw_grpc import Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually
from naiad.tokenization import pack_word_list

VOCABULARY = 49152
U64 = np.uint64


def without(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != name}


ENSEMBLE_CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"text_input": ""}, {}, "text_input is empty"),
    (
        {"text_input": "word " * 3000},
        {},
        "the prompt has 3001 tokens: at most 2047 are allowed (max_model_len = 2048,",
    ),
    ({"text_input": "x" * 131_073}, {}, "the prompt has 131073 bytes: at most 131072 are allowed"),
    ({"max_tokens": 0}, {}, "max_tokens = 0"),
    ({"max_tokens": -1}, {}, "max_tokens = -1"),
    ({"temperature": float("nan")}, {}, "temperature = nan"),
    ({"temperature": -1.0}, {}, "temperature = -1.0"),
    ({"temperature": float("inf")}, {}, "temperature = inf"),
    ({"top_p": 1.5}, {}, "top_p = 1.5"),
    ({"top_k": -1}, {}, "top_k = -1"),
    ({}, {"seed": -1}, "seed = -1"),
    ({}, {"surprise": 1}, "unknown parameter 'surprise'"),
    ({"stop_words": "s" * 10_000}, {}, "stop_words has an entry of 10000 bytes"),
    ({"stop_words": ["s"] * 10_000}, {}, "stop_words has 10000 entries"),
    ({"text_input": b"\xff\xfe"}, {}, "text_input is not valid UTF-8"),
    ({"messages": "[]"}, {}, "either text_input or messages"),
    ({"beam_width": 17}, {}, "beam_width = 17"),
    ({"beam_width": 4}, {}, "stream = True is not supported with beam_width = 4"),
    ({"length_penalty": 2.0}, {}, "length_penalty = 2.0: expected 0.0 or 1.0 without beams"),
    ({"bad_words": ["b"] * 1025}, {}, "bad_words has 1025 entries: at most 1024"),
    ({"embedding_bias_words": ["a"], "embedding_bias_weights": [1e6]}, {}, "embedding_bias_weights holds"),
    ({"embedding_bias_words": ["a"]}, {}, "embedding_bias_words has 1 words"),
    ({"logit_bias_ids": [5]}, {}, "logit_bias_ids has 1 ids and logit_bias_values 0 values"),
    ({"allowed_token_ids": [VOCABULARY]}, {}, f"allowed_token_ids holds {VOCABULARY}"),
    ({"min_p": 2.0}, {}, "min_p = 2.0"),
    ({"priority": 101}, {}, "priority = 101"),
    ({"num_log_probs": 21}, {}, "num_log_probs = 21"),
    ({"num_return_sequences": 17}, {}, "num_return_sequences = 17"),
    ({"cache_salt": "s" * 257}, {}, "cache_salt has 257 bytes"),
    ({}, {"cache_salt": 5}, "cache_salt = 5"),
    ({"return_generation_logits": True, "max_tokens": 1366}, {}, "at most 268435456 are allowed"),
    (
        {"guided_decoding_guide": "{}"},
        {},
        "guided_decoding_guide was sent without",
    ),
]


@pytest.mark.parametrize("model", ["ensemble", "text"])
@pytest.mark.parametrize(
    ("fields", "parameters", "message"), ENSEMBLE_CASES, ids=[case[2] for case in ENSEMBLE_CASES]
)
def test_text_is_refused(
    server: Server, model: str, fields: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    outcome = ask(server.grpc, model, text_inputs("Hello", 5) | fields, parameters=parameters)
    assert len(outcome.errors) == 1
    assert message in outcome.errors[0]
    assert (outcome.num_finals, outcome.responses) == (1, [])
    eventually(lambda: server.used_blocks() == 0)


LLM_CASES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [1, VOCABULARY]}, f"input_ids holds {VOCABULARY}"),
    ({"input_ids": [1, -5]}, "input_ids holds -5"),
    ({"input_lengths": 0}, "the prompt is empty"),
    ({"input_lengths": 3}, "input_lengths = 3"),
    (
        {"input_ids": [1] * 2048, "input_lengths": 2048},
        "the prompt has 2048 tokens: at most 2047 are allowed (max_model_len = 2048,",
    ),
    ({"stop_token_ids": [VOCABULARY]}, f"stop_token_ids holds {VOCABULARY}"),
    ({"end_id": -2}, "end_id = -2"),
    ({"pad_id": -2}, "pad_id = -2"),
    (
        {"bad_words_list": pack_word_list([[VOCABULARY]])[None]},
        f"bad_words_list holds {VOCABULARY}",
    ),
    ({"embedding_bias": [1.0, 2.0]}, f"embedding_bias has 2 values: expected 0 or {VOCABULARY}"),
]


@pytest.mark.parametrize(("fields", "message"), LLM_CASES, ids=[case[1] for case in LLM_CASES])
def test_llm_refuses(server: Server, fields: dict[str, Any], message: str) -> None:
    outcome = ask(server.grpc, "llm", llm_inputs([1, 2], 5) | fields)
    assert len(outcome.errors) == 1
    assert message in outcome.errors[0]
    assert outcome.num_finals == 1


DETOKENIZER_CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"window_ids": [5, 6]}, {}, "sequence_id is missing"),
    ({"sequence_id": np.array([[1]], dtype=U64)}, {}, "window_ids is missing"),
    ({}, {"surprise": 1}, "unknown parameter 'surprise'"),
    ({"SEQUENCE_LENGTH": [1, 1]}, {}, "SEQUENCE_LENGTH has 2 values for 1 rows"),
    ({"text_chunk": np.array([[1, 1, 5]])}, {}, "text_chunk does not go with SEQUENCE_LENGTH"),
    (
        {"text_chunk": np.array([[1, 2, 5]]), "TOKENS_BATCH": None, "SEQUENCE_LENGTH": None},
        {},
        "text_chunk has shape [1, 3] and begins with [1, 2]: expected one row of a sequence id",
    ),
    (
        {"text_chunk": np.array([[1, 1, -5]]), "TOKENS_BATCH": None, "SEQUENCE_LENGTH": None},
        {},
        "-5",
    ),
]


@pytest.mark.parametrize(
    ("fields", "parameters", "message"), DETOKENIZER_CASES, ids=[case[2] for case in DETOKENIZER_CASES]
)
def test_detokenizer_refuses(
    server: Server, fields: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    inputs = {"TOKENS_BATCH": np.array([[[504]]], dtype=np.int32), "SEQUENCE_LENGTH": [1]} | fields
    inputs = {name: value for name, value in inputs.items() if value is not None}
    outcome = ask(server.grpc, "detokenizer", inputs, parameters=parameters)
    assert len(outcome.errors) == 1
    assert message in outcome.errors[0]
    assert outcome.num_finals == 1


def test_chunks_of_several_rows_are_refused_by_the_detokenizer(server: Server) -> None:
    inputs = {
        "TOKENS_BATCH": np.full((2, 1, 1), 504, dtype=np.int32),
        "SEQUENCE_LENGTH": np.ones((2, 1), dtype=np.int32),
        "sequence_id": np.ones((2, 1), dtype=U64),
        "window_ids": np.full((2, 1), 504, dtype=np.int32),
        "num_emitted_tokens": np.zeros((2, 1), dtype=np.int32),
        "max_chars": np.full((2, 1), -1, dtype=np.int32),
        "is_last": np.ones((2, 1), dtype=np.bool_),
    }
    outcome = ask(server.grpc, "detokenizer", inputs)
    assert ["sequence_id has 2 rows: expected 1" in error for error in outcome.errors] == [True]
    assert outcome.num_finals == 1


def test_wrong_dtype_and_missing_tensor_are_named(server: Server) -> None:
    for value in (1.5, 5.0, "10"):
        wrong = ask(server.grpc, "ensemble", text_inputs("Hello", 5) | {"max_tokens": value})
        assert (len(wrong.errors), wrong.responses) == (1, [])
        assert "max_tokens" in wrong.errors[0]
    missing = ask(server.grpc, "ensemble", without(text_inputs("Hello", 5), "max_tokens"))
    assert "max_tokens is missing" in missing.errors[0]


def test_seed_accepts_all_64_bits(server: Server) -> None:
    seed = np.array([[2**64 - 1]], dtype=U64)
    outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 3, temperature=0.9, top_k=5, seed=seed))
    assert outcome.errors == []


def test_neighbours_of_refused_requests_are_unharmed(tiny: Server) -> None:
    good = text_inputs("The first president", 32, ignore_eos=True)
    alone = ask(tiny.grpc, "ensemble", good).text
    neighbour = Stream(tiny.grpc, "ensemble", good)
    for fields, parameters, _ in ENSEMBLE_CASES:
        ask(tiny.grpc, "ensemble", text_inputs("Hello", 5) | fields, parameters=parameters)
    assert neighbour.join().text == alone


def test_http_refusal_is_a_clear_400(server: Server) -> None:
    status, text = server.post(
        "/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 3, "top_p": 1.5}
    )
    assert status == 400
    assert "top_p = 1.5" in text
    assert "/" not in text.split("top_p", 1)[1]


@pytest.mark.parametrize("model", ["ensemble", "text"])
@pytest.mark.parametrize("value", ["ten", "10", 1.5])
def test_triton_refuses_http_max_tokens_that_are_no_whole_number(
    server: Server, model: str, value: str | float
) -> None:
    """Its own JSON reader does, before any model sees the request; it does not name the field."""
    num_before = server.metric("nv_inference_request_failure", model=model)
    status, text = server.post(f"/v2/models/{model}/generate", {"text_input": "a", "max_tokens": value})
    assert (status, "as signed-integer" in text) == (500, True), text
    assert server.metric("nv_inference_request_failure", model=model) == num_before
    assert ask(server.grpc, model, text_inputs("Hello", 2)).errors == []


def test_a_forged_text_context_harms_nobody(tiny: Server) -> None:
    neighbour = Stream(tiny.grpc, "ensemble", text_inputs("Once", 60, ignore_eos=True))
    for context in ('{"stop_strings": [""]}', '{"num_prompt_chars": 1180591620717411303424}', "[]"):
        outcome = ask(tiny.grpc, "llm", llm_inputs([104], 4, text_context=context))
        assert (len(outcome.errors), outcome.num_finals) == (1, 1)
        assert "text_context" in outcome.errors[0]
    outcome = neighbour.join()
    assert (outcome.errors, outcome.num_finals) == ([], 1)


@pytest.mark.parametrize("timeout", [1.5, True, 1e300, -1])
def test_http_timeout_is_a_whole_number_of_microseconds(server: Server, timeout: float) -> None:
    body = {"text_input": "a", "max_tokens": 3, "timeout": timeout}
    status, text = server.post("/v2/models/ensemble/generate", body)
    assert status == 400
    assert "timeout = " in text
