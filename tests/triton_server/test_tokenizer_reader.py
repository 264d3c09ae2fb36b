from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import FakeSource
from naiad.errors import InvalidRequestError
from naiad.frontend.prompt import PromptEncoder
from naiad.tokenization import Tokenizer, unpack_word_list
from naiad.triton_server.requests.tokenizer import TokenizerReader

MAX_MODEL_LEN = 50
VOCAB_SIZE = 500


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> TokenizerReader:
    return TokenizerReader(PromptEncoder(tokenizer, MAX_MODEL_LEN, VOCAB_SIZE))


def source(*texts: str, parameters: dict[str, Any] | None = None, **tensors: Any) -> FakeSource:
    rows = max(len(texts), 1)
    inputs: dict[str, Any] = {"REQUEST_OUTPUT_LEN": np.full((rows, 1), 5, dtype=np.int32), **tensors}
    if texts:
        inputs["QUERY"] = column(*texts)
    return FakeSource(inputs, parameters or {})


def column(*texts: str) -> Any:
    return np.array([[text.encode()] for text in texts], dtype=np.object_)


def words(*row: str) -> Any:
    return np.array([[word.encode() for word in row]], dtype=np.object_)


def context(outputs: dict[str, Any], row: int = 0) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(outputs["text_context"][row, 0])
    return decoded


def test_there_is_a_placeholder_for_encoder_decoder_models(reader: TokenizerReader) -> None:
    outputs = reader.read(source("a", "a longer text"))
    assert outputs["DECODER_INPUT_ID"].shape == (2, 1)
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1], [1]]


def test_the_context_says_when_the_request_came(reader: TokenizerReader) -> None:
    outputs = reader.read(source("a", "a longer text"), 12.5)
    assert [context(outputs, row)["received_s"] for row in (0, 1)] == [12.5, 12.5]


def test_rows_are_padded_to_the_longest(reader: TokenizerReader, tokenizer: Tokenizer) -> None:
    outputs = reader.read(source("a", "a longer text"))
    ids, lengths = outputs["INPUT_ID"], outputs["REQUEST_INPUT_LEN"]
    assert ids[0, : lengths[0, 0]].tolist() == tokenizer.encode("a", add_special_tokens=True)
    assert ids[1].tolist() == tokenizer.encode("a longer text", add_special_tokens=True)
    assert (ids.dtype, lengths.shape) == (np.int32, (2, 1))


def test_stop_words_travel_as_text_and_packed(reader: TokenizerReader, tokenizer: Tokenizer) -> None:
    outputs = reader.read(source("a", STOP_WORDS_DICT=words("stop", "", "end")))
    assert context(outputs)["stop_strings"] == ["stop", "end"]
    expected = [tokenizer.encode(word, add_special_tokens=False) for word in ("stop", "end")]
    assert unpack_word_list(outputs["STOP_WORDS_IDS"][0]) == expected


def test_no_stop_words_make_tensorrt_llms_empty_list(reader: TokenizerReader) -> None:
    outputs = reader.read(source("a"))
    assert outputs["STOP_WORDS_IDS"].shape == (1, 2, 0)
    assert outputs["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert outputs["EMBEDDING_BIAS"].shape == (1, 0)


def test_end_and_pad_default_to_the_tokenizers(reader: TokenizerReader, tokenizer: Tokenizer) -> None:
    outputs = reader.read(source("a"))
    assert outputs["OUT_END_ID"].tolist() == [[tokenizer.eos_id]]
    sent = reader.read(source("a", END_ID=np.array([[9]], dtype=np.int32)))
    assert sent["OUT_END_ID"].tolist() == [[9]]


def test_context_primes_the_text_with_the_prompt(reader: TokenizerReader, tokenizer: Tokenizer) -> None:
    outputs = reader.read(source("héllo"))
    assert context(outputs)["num_prompt_chars"] == 5
    assert context(outputs)["prompt_tail_ids"] == tokenizer.prompt_tail(outputs["INPUT_ID"][0].tolist())


def test_text_may_come_as_a_parameter(reader: TokenizerReader) -> None:
    as_tensor = reader.read(source("a", STOP_WORDS_DICT=words("b"), BAD_WORDS_DICT=words("c")))
    sent = {"text_input": "a", "stop_words": "b", "bad_words": "c"}
    as_parameter = reader.read(source(parameters=sent))
    for name in ("text_context", "BAD_WORDS_IDS"):
        assert as_parameter[name].tolist() == as_tensor[name].tolist()


def test_bad_words_are_banned_with_and_without_a_space(reader: TokenizerReader, tokenizer: Tokenizer) -> None:
    outputs = reader.read(source("a", BAD_WORDS_DICT=words("stop", "", " fox")))
    expected = [tokenizer.encode(word, add_special_tokens=False) for word in ("stop", " stop", "fox", " fox")]
    assert unpack_word_list(outputs["BAD_WORDS_IDS"][0]) == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (source(), "neither was sent"),
        (source("a", messages=column("[]")), "both was sent"),
        (source(""), "text_input is empty"),
        (source("x" * (64 * MAX_MODEL_LEN + 1)), "the prompt has 3201 bytes: at most 3200"),
        (source("a", STOP_WORDS_DICT=words(*["s"] * 65)), "stop_words has 65 entries: at most 64"),
        (source("a", STOP_WORDS_DICT=words("s" * 257)), "stop_words has an entry of 257 bytes: at most 256"),
        (source(QUERY=np.array([[b"\xff"]], dtype=np.object_)), "text_input is not valid UTF-8"),
        (source("a", BAD_WORDS_DICT=words(*["b"] * 1025)), "bad_words has 1025 entries: at most 1024"),
        (source("a", BAD_WORDS_DICT=words("b" * 257)), "bad_words has an entry of 257 bytes: at most 256"),
        (source(parameters={"text_input": "\ud800"}), "the prompt holds half a surrogate pair"),
        (source("a", DECODER_QUERY=column("b")), "decoder_text_input is not supported"),
        (source("a", IMAGE_URL=column("http://x")), "IMAGE_URL is not supported"),
        (source("a", parameters={"colour": "blue"}), "unknown parameter 'colour'"),
        (source(messages=column("{")), "messages"),
    ],
)
def test_refusals_name_the_field(reader: TokenizerReader, request_: FakeSource, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        reader.read(request_)


def test_refusals_never_show_the_prompt(reader: TokenizerReader) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        reader.read(source("canary " * 1000))
    assert "canary" not in str(caught.value)


def test_max_tokens_is_required_as_tensor_or_parameter(reader: TokenizerReader) -> None:
    without = source("a", "b")
    del without.inputs["REQUEST_OUTPUT_LEN"]
    with pytest.raises(InvalidRequestError, match="max_tokens is missing"):
        reader.read(without)
    without.sent_parameters["max_tokens"] = 7
    assert reader.read(without)["REQUEST_OUTPUT_LEN"].tolist() == [[7], [7]]


def test_empty_bad_words_are_off(reader: TokenizerReader) -> None:
    assert reader.read(source("a", BAD_WORDS_DICT=words("")))["INPUT_ID"].size


def test_ids_outside_the_vocabulary_are_not_defaults(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_id is not None
    small = TokenizerReader(PromptEncoder(tokenizer, MAX_MODEL_LEN, tokenizer.eos_id))
    outputs = small.read(source("a"))
    assert outputs["OUT_END_ID"].tolist() == [[-1]]
    assert outputs["OUT_PAD_ID"].tolist() == [[-1]]


def test_an_id_may_be_a_parameter_and_a_tensor_wins(reader: TokenizerReader) -> None:
    parameters = {"end_id": 7, "pad_id": 8}
    made = reader.read(source("a", "b", parameters=parameters))
    assert (made["OUT_END_ID"].tolist(), made["OUT_PAD_ID"].tolist()) == ([[7], [7]], [[8], [8]])
    made = reader.read(source("a", parameters=parameters, END_ID=np.array([[9]], dtype=np.int32)))
    assert (made["OUT_END_ID"].tolist(), made["OUT_PAD_ID"].tolist()) == ([[9]], [[8]])
    with pytest.raises(InvalidRequestError, match="end_id = -2"):
        reader.read(source("a", parameters={"end_id": -2}))
