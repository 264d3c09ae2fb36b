from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.field import Field, Kind
from naiad.frontend.fields import FIELDS
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.triton_server.requests.llm import read_request


def read(source: FakeSource) -> GenerateRequest:
    request = read_request(source, LIMITS)
    assert isinstance(request, GenerateRequest)
    return request


def test_defaults_are_tensorrt_llms() -> None:
    request = read(llm_source())
    params = request.rows[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (4, 0.0, 0, 1.0)
    assert params.stop_token_ids == (2,)
    assert not request.streaming
    assert not request.exclude_input


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"request_output_len": 0}, "request_output_len = 0"),
        ({"request_output_len": -1}, "request_output_len = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"runtime_top_p": 1.5}, "runtime_top_p = 1.5"),
        ({"runtime_top_k": -1}, "runtime_top_k = -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"presence_penalty": 1e6}, "presence_penalty = 1000000.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = nan"),
        ({"min_tokens": 5}, "min_tokens = 5"),
        ({"end_id": -2}, "end_id = -2"),
        ({"pad_id": -2}, "pad_id = -2"),
        ({"stop_token_ids": 1000}, "stop_token_ids holds 1000"),
        ({"input_lengths": 9}, "input_lengths = 9"),
        ({"beam_width": 17}, "beam_width = 17: expected a finite number ≥ 1 and ≤ 16"),
        ({"beam_search_diversity_rate": -0.5}, "beam_search_diversity_rate = -0.5: expected a finite number"),
        (
            {"runtime_top_p_decay": 0.0, "runtime_top_p": 0.9},
            "runtime_top_p_decay = 0.0: expected a",
        ),
        ({"runtime_top_p_decay": 0.5}, "runtime_top_p_decay = 0.5: expected top_p > 0"),
        ({"runtime_top_p_min": 1.5}, "runtime_top_p_min = 1.5"),
        ({"runtime_top_p_reset_ids": -2}, "runtime_top_p_reset_ids = -2"),
        ({"num_return_sequences": 0}, "num_return_sequences = 0: expected a finite number ≥ 1 and ≤ 16"),
        ({"num_return_sequences": 17}, "num_return_sequences = 17"),
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"min_p": float("nan")}, "min_p = nan"),
        ({"priority": 101}, "priority = 101: expected a finite number ≥ -100 and ≤ 100"),
        ({"priority": -101}, "priority = -101"),
        ({"num_log_probs": -1}, "num_log_probs = -1"),
        ({"num_log_probs": 21}, "num_log_probs = 21: expected a finite number ≥ 0 and ≤ 20"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output = 1: expected true or false"),
        ({"return_log_probs": 1}, "return_log_probs = 1: expected true or false"),
        ({"lora_task_id": 3}, "lora_task_id is not supported"),
        ({"cache_salt": b"x" * 257}, "cache_salt has 257 bytes: at most 256"),
        ({"cache_salt": b"\xff"}, "cache_salt is not valid UTF-8"),
        ({"cache_salt": np.array([[b"a", b"b"]], dtype=np.object_)}, "cache_salt has 2 values a row"),
        ({"draft_input_ids": np.array([[1, 1000]])}, "draft_input_ids holds 1000"),
        ({"draft_input_ids": np.ones((1, 4097), int)}, "draft_input_ids has 4097 ids: at most 4096"),
        (
            {"draft_input_ids": np.array([[1]]), "beam_width": 2},
            "draft_input_ids has 1 ids: expected none with beam_width = 2",
        ),
        ({"num_draft_tokens": -1}, "num_draft_tokens = -1"),
        ({"decoder_input_ids": np.array([[2, 3]], dtype=np.int32)}, "decoder_input_ids is not supported"),
        ({"decoder_input_lengths": 2}, "decoder_input_lengths is not supported"),
    ],
)
def test_bad_field_is_named_with_its_value(tensors: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + named.replace("(", r"\(")):
        read_request(llm_source(**tensors), LIMITS)


def test_fields_are_named_as_their_client_knows_them() -> None:
    context = np.array([[b"{}"]], dtype=np.object_)
    for source in (llm_source(runtime_top_k=-1, text_context=context), llm_source(parameters={"top_k": -1})):
        with pytest.raises(InvalidRequestError, match=r"^top_k = -1"):
            read_request(source, LIMITS)


@pytest.mark.parametrize("token_id", [-1, 1000, 2**31 - 1])
def test_prompt_ids_stay_in_the_vocabulary(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"input_ids holds {token_id}"):
        read_request(llm_source([1, token_id]), LIMITS)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        read_request(llm_source([]), LIMITS)


@pytest.mark.parametrize("name", ["input_ids", "input_lengths", "request_output_len"])
def test_required_tensor_that_is_missing_is_named(name: str) -> None:
    source = llm_source()
    del source.inputs[name]
    with pytest.raises(InvalidRequestError, match=f"^{name} is missing"):
        read_request(source, LIMITS)


def test_prompt_must_leave_room_for_a_token() -> None:
    with pytest.raises(InvalidRequestError, match="100 tokens: at most 99"):
        read_request(llm_source([1] * 100), LIMITS)
    assert read(llm_source([1] * 99)).rows[0].params.max_tokens == 1


def test_max_tokens_beyond_the_window_is_clamped() -> None:
    assert read(llm_source(request_output_len=2**31 - 1)).rows[0].params.max_tokens == 97


@pytest.mark.parametrize(
    "switched_off",
    [
        {"beam_width": 1},
        {"len_penalty": 1.0},
        {"return_perf_metrics": False},
        {"draft_input_ids": np.zeros((1, 0), dtype=np.int32)},
        {"guided_decoding_guide": b""},
        {"decoder_input_ids": np.array([[2]], dtype=np.int32), "decoder_input_lengths": 1},
        {"lora_task_id": 0},
    ],
)
def test_unserved_field_that_is_off_is_accepted(switched_off: dict[str, Any]) -> None:
    assert read(llm_source(**switched_off)).rows


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 5}, "unknown parameter 'max_new_tokens'"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_k": 1.5}, "top_k = 1.5"),
        ({"stream": 1}, "stream = 1"),
        ({"accumulate_tokens": 1}, "accumulate_tokens = 1: expected true or false"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"timeout": "soon"}, "timeout = 'soon'"),
        ({"timeout": -5}, "timeout = -5"),
        ({"timeout": 1.5}, "timeout = 1.5"),
        ({"timeout": True}, "timeout = True"),
        ({"timeout": 1e300}, "timeout = 1e"),
        ({"timeout": float("inf")}, "timeout = inf"),
        ({"timeout": 10**15}, "timeout = 1000000000000000"),
        ({"beam_width": 0}, "beam_width = 0"),
        ({"cache_salt": 5}, "cache_salt = 5: expected a string"),
        ({"cache_salt": "é" * 129}, "cache_salt has 258 bytes: at most 256"),
        ({"cache_salt": "\ud800"}, "cache_salt holds half a surrogate pair"),
        ({"logit_bias_ids": 5}, "unknown parameter 'logit_bias_ids'"),
        ({"min_p": "a"}, "min_p = 'a'"),
        ({"temperature": True}, "temperature = True"),
    ],
)
def test_bad_parameter_is_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + message):
        read_request(llm_source(parameters=parameters), LIMITS)


def test_parameters_stand_in_for_tensors_and_tensors_win() -> None:
    parameters = {"temperature": 0.5, "top_k": 7, "id": "x", "timeout": 2_000_000, "sequence_id": 0}
    request = read(llm_source(parameters=parameters, runtime_top_k=3))
    assert request.rows[0].params.temperature == 0.5
    assert request.rows[0].params.top_k == 3
    assert request.timeout_s == 2.0


def test_tritons_own_timeout_is_the_deadline() -> None:
    source = llm_source()
    source.timeout_us = 1_500_000
    assert read(source).timeout_s == 1.5


def test_forwarded_headers_are_allowed_when_configured() -> None:
    limits = LIMITS.__class__(100, 1000, (2,), False, forwarded_headers="x-.*")
    assert read_request(llm_source(parameters={"x-trace": "1"}), limits)
    with pytest.raises(InvalidRequestError, match="x-trace"):
        read_request(llm_source(parameters={"x-trace": "1"}), LIMITS)


def test_new_scalars_reach_the_row() -> None:
    request = read(llm_source(min_p=0.25, priority=-100, cache_salt=b"tenant"))
    row = request.rows[0]
    assert (row.params.min_p, row.params.priority, row.cache_salt) == (0.25, -100, "tenant")
    assert read(llm_source()).rows[0].cache_salt == ""
    assert read(llm_source(parameters={"cache_salt": "t", "min_p": 0.5})).rows[0].cache_salt == "t"


def test_ignore_eos_keeps_only_what_was_asked_for() -> None:
    assert read(llm_source(ignore_eos=True)).rows[0].params.stop_token_ids == ()
    params = read(llm_source(ignore_eos=True, stop_token_ids=np.array([[9, 9]]))).rows[0].params
    assert params.stop_token_ids == (9,)


def test_end_id_joins_the_checkpoints_list() -> None:
    assert read(llm_source(end_id=7)).rows[0].params.stop_token_ids == (2, 7)
    assert read(llm_source(end_id=-1)).rows[0].params.stop_token_ids == (2,)


def test_ids_beyond_the_vocabulary_neither_end_nor_pad() -> None:
    params = read(llm_source(end_id=1_048_576, pad_id=1_048_576)).rows[0].params
    assert params.stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("text_input", "input_ids"),
        ("messages", "input_ids"),
        ("stop_words", "stop_words_list"),
        ("bad_words", "bad_words_list"),
    ],
)
def test_text_as_a_parameter_is_refused_unless_the_tokenizer_has_read_it(name: str, instead: str) -> None:
    seed = np.array([[1]], dtype=np.uint64)
    refused = f"^{name} = 'END' is text, which `llm` does not tokenize: expected token ids, in {instead}$"
    with pytest.raises(InvalidRequestError, match=refused):
        read_request(llm_source(seed=seed, parameters={name: "END"}), LIMITS)
    assert read(llm_source(seed=seed, parameters={name: ""})) == read(llm_source(seed=seed))
    context = np.array([[b"{}"]], dtype=np.object_)
    through_the_tokenizer = read(llm_source(seed=seed, text_context=context, parameters={name: "END"}))
    assert through_the_tokenizer == read(llm_source(seed=seed, text_context=context))


def test_accumulate_tokens_is_the_models_own_parameter() -> None:
    plain = read(llm_source(seed=np.array([[1]], dtype=np.uint64)))
    for value in (True, False):
        source = llm_source(seed=np.array([[1]], dtype=np.uint64), parameters={"accumulate_tokens": value})
        assert read(source) == plain


def test_stop_needs_a_request_id() -> None:
    with pytest.raises(InvalidRequestError, match="A request id must be provided for request cancellation"):
        read_request(llm_source(stop=True), LIMITS)
    source = llm_source(stop=True)
    source.request_id = "r"
    assert read_request(source, LIMITS) == StopRequest("r")


def test_unseeded_requests_draw_different_seeds() -> None:
    seeds = {read(llm_source()).rows[0].params.seed for _ in range(8)}
    assert len(seeds) == 8


def test_both_names_of_the_seed_must_agree() -> None:
    seven, eight = (np.array([[seed]], dtype=np.uint64) for seed in (7, 8))
    assert read(llm_source(random_seed=seven)).rows[0].params.seed == 7
    assert read(llm_source(seed=seven, random_seed=seven)).rows[0].params.seed == 7
    with pytest.raises(InvalidRequestError, match=r"^seed = 7 and random_seed = 8: expected one"):
        read_request(llm_source(seed=seven, random_seed=eight), LIMITS)


def test_both_names_of_the_least_length_must_agree() -> None:
    assert read(llm_source(min_tokens=3, min_length=3)).rows[0].params.min_tokens == 3
    assert read(llm_source(min_length=2)).rows[0].params.min_tokens == 2
    with pytest.raises(InvalidRequestError, match=r"^min_tokens = 3 and min_length = 2: expected one"):
        read_request(llm_source(min_tokens=3, min_length=2), LIMITS)


@pytest.mark.parametrize(
    ("field", "bound"),
    [
        (field, bound)
        for field in FIELDS
        if field.kind is Kind.FP32 and field.served and field.is_scalar
        for bound in (field.minimum, field.maximum)
        if math.isfinite(bound)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_bound_is_allowed_as_float32_too(field: Field, bound: float) -> None:
    in_float32 = np.float32(bound)
    for value in (bound, in_float32.item()):
        assert field.check(value) == bound
    beyond = np.nextafter(in_float32, np.float32(-math.inf if bound <= 0.01 else math.inf))
    with pytest.raises(InvalidRequestError, match=f"^{field.name} = "):
        field.check(beyond.item())


@pytest.mark.parametrize("is_streaming", [True, False])
def test_tensorrt_llms_client_sends_streaming_twice(is_streaming: bool) -> None:
    twice = llm_source(streaming=is_streaming)
    twice.sent_parameters["Streaming"] = is_streaming
    assert read(twice).streaming is is_streaming
    once = llm_source()
    once.sent_parameters["Streaming"] = is_streaming
    assert read(once).streaming is is_streaming


def test_only_the_id_of_a_stop_request_is_read() -> None:
    """TensorRT-LLM's client fills the required tensors with values that no other request could have."""
    source = llm_source([0], stop=True, request_output_len=0, input_lengths=0)
    source.request_id = "7"
    assert read_request(source, LIMITS) == StopRequest("7")


def test_drafts_reach_the_row() -> None:
    row = read(llm_source(draft_input_ids=np.array([[4, 5]]), num_draft_tokens=3)).rows[0]
    assert (row.draft_token_ids, row.params.num_draft_tokens) == ((4, 5), 3)
    row = read(llm_source()).rows[0]
    assert (row.draft_token_ids, row.params.num_draft_tokens) == ((), -1)
