"""The text model reads a request as the ensemble's steps would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import LIMITS, FakeSource, llm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.field import Frontend
from naiad.frontend.fields import FIELDS
from naiad.frontend.prompt import PromptEncoder
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.requests.tokenizer import TokenizerReader

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))
    return PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size)


@pytest.fixture
def reader(encoder: PromptEncoder) -> TextRequestReader:
    return TextRequestReader(encoder)


def text_source(*prompts: str, parameters: dict[str, Any] | None = None, **tensors: Any) -> FakeSource:
    """A request with a row for each prompt; scalars become [rows, 1]."""
    rows = max(len(prompts), 1)
    inputs: dict[str, Any] = {"max_tokens": np.full((rows, 1), 5, dtype=np.int32)}
    if prompts:
        inputs["text_input"] = np.array([[each.encode()] for each in prompts], dtype=np.object_)
    for name, value in tensors.items():
        inputs[name] = value if isinstance(value, np.ndarray) else np.array([[value]] * rows)
    return FakeSource(inputs, parameters or {})


def words(*row: str) -> Any:
    return np.array([[each.encode() for each in row]], dtype=np.object_)


def through_the_steps(encoder: PromptEncoder, source: FakeSource) -> GenerateRequest:
    """The request that the ensemble's steps make of it, by the names in its config.pbtxt."""
    config = text_format.Parse((REPOSITORY / "ensemble" / "config.pbtxt").read_text(), ModelConfig())
    first, second, _ = config.ensemble_scheduling.step
    sent = source.tensors()
    made = TokenizerReader(encoder).read(
        replace_tensors(source, {key: sent[name] for key, name in first.input_map.items() if name in sent})
    )
    known = sent | {name: made[key] for key, name in first.output_map.items() if key in made}
    tensors = {key: known[name] for key, name in second.input_map.items() if name in known}
    request = read_request(replace_tensors(source, tensors), LIMITS)
    assert isinstance(request, GenerateRequest)
    return request


def replace_tensors(source: FakeSource, tensors: dict[str, Any]) -> FakeSource:
    return replace(source, inputs=tensors)


def test_names_are_the_ensembles_wiring() -> None:
    config = text_format.Parse((REPOSITORY / "ensemble" / "config.pbtxt").read_text(), ModelConfig())
    tokenizer, llm, _ = config.ensemble_scheduling.step
    outer = {each.name for each in config.input}
    for step, frontend in ((tokenizer, Frontend.TOKENIZER), (llm, Frontend.LLM)):
        wired = {(value, key) for key, value in step.input_map.items() if value in outer}
        names = {(field.name_at(Frontend.ENSEMBLE), field.name_at(frontend)) for field in FIELDS}
        assert wired - names == set()


CASES: list[dict[str, Any]] = [
    {},
    {"stream": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 7},
    {"stop_words": words("END", "stop"), "include_stop_str_in_output": True},
    {"bad_words": words("fox"), "embedding_bias_words": words("dog"), "embedding_bias_weights": 2.0},
    {"beam_width": 2, "length_penalty": 1.0, "early_stopping": True},
    {"num_return_sequences": 3, "seed": 7, "return_finish_reason": True, "exclude_input_in_output": True},
    {"end_id": 9, "pad_id": 8, "stop_token_ids": np.array([[5, 6]], dtype=np.int32), "seed": 1},
]


@pytest.mark.parametrize("fields", CASES)
def test_a_request_is_what_the_ensemble_makes_of_it(
    encoder: PromptEncoder, reader: TextRequestReader, fields: dict[str, Any]
) -> None:
    source = text_source("The quick brown", parameters={"timeout": 5}, **{"seed": 3, **fields})
    assert reader.read(source, LIMITS) == through_the_steps(encoder, source)


def test_rows_keep_their_prompts(encoder: PromptEncoder, reader: TextRequestReader) -> None:
    source = text_source("The quick", "A much longer text", seed=5)
    request = reader.read(source, LIMITS)
    assert isinstance(request, GenerateRequest)
    assert request == through_the_steps(encoder, source)
    assert len(request.rows) == 2
    assert len(request.rows[0].prompt_token_ids) < len(request.rows[1].prompt_token_ids)


def test_every_row_of_the_tensors_counts_if_the_prompt_is_a_parameter(reader: TextRequestReader) -> None:
    tensors = {
        "seed": np.array([[1], [2], [3]], dtype=np.uint64),
        "temperature": np.array([[0.25], [0.5], [0.75]], dtype=np.float32),
    }
    request = reader.read(FakeSource(tensors, {"text_input": "The quick", "max_tokens": 4}), LIMITS)
    assert isinstance(request, GenerateRequest)
    sampled = [(row.params.seed, row.params.temperature) for row in request.rows]
    assert sampled == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len({tuple(row.prompt_token_ids) for row in request.rows}) == 1


def test_every_row_of_the_words_is_tokenized_if_the_prompt_is_a_parameter(encoder: PromptEncoder) -> None:
    stops = np.array([[b"a"], [b"b"], [b"c"]], dtype=np.object_)
    source = FakeSource({"STOP_WORDS_DICT": stops}, {"text_input": "The quick", "max_tokens": 4})
    outputs = TokenizerReader(encoder).read(source)
    contexts = [msgspec.json.decode(each) for (each,) in outputs["text_context"]]
    assert [context["stop_strings"] for context in contexts] == [["a"], ["b"], ["c"]]


def test_fields_may_be_parameters(reader: TextRequestReader) -> None:
    parameters = {"text_input": "The quick", "max_tokens": 4, "stream": True, "temperature": 0.5, "seed": 3}
    request = reader.read(FakeSource({}, parameters), LIMITS)
    assert isinstance(request, GenerateRequest)
    (row,) = request.rows
    assert (row.params.max_tokens, row.params.temperature, request.streaming) == (4, 0.5, True)


@pytest.mark.parametrize("how", ["tensor", "parameter"])
def test_stop_needs_an_id_and_nothing_else(reader: TextRequestReader, how: str) -> None:
    tensors = {"stop": np.array([[True]])} if how == "tensor" else {}
    source = FakeSource(tensors, {} if tensors else {"stop": True}, request_id="seven")
    assert reader.read(source, LIMITS) == StopRequest("seven")
    with pytest.raises(InvalidRequestError, match="A request id must be provided"):
        reader.read(replace(source, request_id=""), LIMITS)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature = -1.0"),
    ({"image_url_input": words("http://x")}, "image_url_input is not supported"),
    ({"image_bytes_input": np.zeros((1, 1, 1, 1, 1), dtype=np.uint8)}, "image_bytes_input is not supported"),
    ({"use_draft_logits": True}, "use_draft_logits is not supported"),
    ({"decoder_text_input": words("x")}, "decoder_text_input is not supported"),
    (
        {"guided_decoding_guide": words("{}")},
        "guided_decoding_guide was sent without",
    ),
    ({"lora_task_id": 3}, "lora_task_id is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[case[1] for case in REFUSALS])
def test_what_is_not_served_is_refused_by_name(
    reader: TextRequestReader, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        reader.read(text_source("Hello", **fields), LIMITS)


def test_what_is_off_asks_for_nothing(reader: TextRequestReader) -> None:
    source = text_source("Hello", use_draft_logits=False, lora_task_id=0, stop=False)
    assert isinstance(reader.read(source, LIMITS), GenerateRequest)


def test_unknown_parameters_are_refused(reader: TextRequestReader) -> None:
    with pytest.raises(InvalidRequestError, match="unknown parameter 'surprise'"):
        reader.read(text_source("Hello", parameters={"surprise": 1}), LIMITS)


UNARY = replace(LIMITS, is_decoupled=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streaming": True}, r"^Streaming is only supported in decoupled mode\.$"),
        ({"num_return_sequences": 2}, "the request asks for 2 responses"),
    ],
)
def test_a_model_that_is_not_decoupled_has_one_response(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_request(llm_source(**fields), UNARY)


def test_several_rows_need_a_decoupled_model(reader: TextRequestReader) -> None:
    with pytest.raises(InvalidRequestError, match="the request asks for 3 responses"):
        reader.read(text_source("a", "b", "c"), UNARY)


def test_beams_have_one_response_anyway() -> None:
    request = read_request(llm_source(beam_width=3), UNARY)
    assert isinstance(request, GenerateRequest)
    assert msgspec.structs.asdict(request.rows[0].params)["temperature"] == 0
