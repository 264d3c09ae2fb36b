"""Words that make no tokens, because the vocabulary lacks their bytes, are refused by every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from helpers.triton_server_doubles import LIMITS, FakeSource
from helpers.vllm_requests import source as vllm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.bodies import CompletionBody
from naiad.openai_server.api.errors import api_error_of
from naiad.openai_server.api.reading import RequestReader
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.requests.tokenizer import TokenizerReader
from naiad.triton_server.requests.vllm import VLLMRequestReader

ERASED = "\x04"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_directory(write_tokenizer(folder, byte_level_tokenizer(lacks=ERASED)))
    assert tokenizer.encode(ERASED, add_special_tokens=False) == []
    return PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size)


def strings(*items: str) -> Any:
    return np.array([[item.encode() for item in items]], dtype=np.object_)


def text_source(**tensors: Any) -> FakeSource:
    inputs = {"text_input": strings("a"), "max_tokens": np.array([[5]], dtype=np.int32)}
    return FakeSource(inputs | tensors)


@pytest.mark.parametrize("word", [ERASED, " " + ERASED, ERASED * 2])
def test_a_bad_word_without_tokens_is_refused_by_name(encoder: PromptEncoder, word: str) -> None:
    refused = "bad_words has the word .*, which makes no tokens: expected at least one"
    with pytest.raises(InvalidRequestError, match=refused):
        TextRequestReader(encoder).read(text_source(bad_words=strings("a", word)), LIMITS)
    with pytest.raises(InvalidRequestError, match=refused):
        VLLMRequestReader(encoder).read(vllm_source({"bad_words": [word]}), LIMITS)
    sent = {"QUERY": strings("a"), "REQUEST_OUTPUT_LEN": np.array([[5]], dtype=np.int32)}
    with pytest.raises(InvalidRequestError, match=refused):
        TokenizerReader(encoder).read(FakeSource(sent | {"BAD_WORDS_DICT": strings(word)}))
    body = msgspec.convert({"model": "m", "prompt": "a", "bad_words": [word]}, CompletionBody)
    with pytest.raises(InvalidRequestError, match=refused) as caught:
        RequestReader(encoder, LIMITS).completion(body, "id")
    answer = api_error_of(caught.value)
    assert (answer.status, answer.param) == (400, "bad_words")


def test_a_biased_word_without_tokens_is_refused_by_name(encoder: PromptEncoder) -> None:
    sent = text_source(
        embedding_bias_words=strings("a", ERASED),
        embedding_bias_weights=np.array([[1.0, 5.0]], dtype=np.float32),
    )
    with pytest.raises(InvalidRequestError, match=r"embedding_bias_words has the word '\\x04', which makes"):
        TextRequestReader(encoder).read(sent, LIMITS)


def test_words_with_tokens_and_padding_are_taken(encoder: PromptEncoder) -> None:
    sent = text_source(
        bad_words=strings("fox", ""),
        embedding_bias_words=strings("Z", ""),
        embedding_bias_weights=np.array([[1.0, 5.0]], dtype=np.float32),
    )
    params = TextRequestReader(encoder).read(sent, LIMITS).rows[0].params  # type: ignore[union-attr]
    assert len(params.bad_words) == 2
    assert len(params.logit_bias) == 1
