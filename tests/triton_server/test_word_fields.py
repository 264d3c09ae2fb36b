from __future__ import annotations

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

VOCAB_SIZE = 500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer("byte_level")))


def reader(tokenizer: Tokenizer, vocab_size: int = VOCAB_SIZE) -> TokenizerReader:
    return TokenizerReader(PromptEncoder(tokenizer, 50, vocab_size))


def source(num_rows: int = 1, **tensors: Any) -> FakeSource:
    texts = np.array([[b"a"]] * num_rows, dtype=np.object_)
    lengths = np.full((num_rows, 1), 5, dtype=np.int32)
    return FakeSource({"QUERY": texts, "REQUEST_OUTPUT_LEN": lengths, **tensors})


def words(*rows: list[str]) -> Any:
    return np.array([[word.encode() for word in row] for row in rows], dtype=np.object_)


def weights(*rows: list[float]) -> Any:
    return np.array(rows, dtype=np.float32)


def biased(outputs: dict[str, Any], row: int = 0) -> dict[int, float]:
    bias = outputs["EMBEDDING_BIAS"][row]
    return {int(token_id): float(bias[token_id]) for token_id in np.flatnonzero(bias)}


def test_each_id_of_a_word_gets_its_weight(tokenizer: Tokenizer) -> None:
    sent = source(EMBEDDING_BIAS_WORDS=words(["fox", "Z"]), EMBEDDING_BIAS_WEIGHTS=weights([1.5, -2.0]))
    outputs = reader(tokenizer).read(sent)
    expected: dict[int, float] = {}
    for word, weight in (("fox", 1.5), ("Z", -2.0)):
        for token_id in tokenizer.encode(word, add_special_tokens=False):
            expected[token_id] = expected.get(token_id, 0.0) + weight
    assert biased(outputs) == expected
    assert (outputs["EMBEDDING_BIAS"].shape, outputs["EMBEDDING_BIAS"].dtype) == ((1, VOCAB_SIZE), np.float32)


def test_a_word_that_repeats_adds_up_and_padding_counts_nothing(tokenizer: Tokenizer) -> None:
    sent = source(EMBEDDING_BIAS_WORDS=words(["Z", "Z", ""]), EMBEDDING_BIAS_WEIGHTS=weights([1, 2, 9]))
    (token_id,) = tokenizer.encode("Z", add_special_tokens=False)
    assert biased(reader(tokenizer).read(sent)) == {token_id: 3.0}


def test_rows_have_their_own_words(tokenizer: Tokenizer) -> None:
    sent = source(
        2,
        EMBEDDING_BIAS_WORDS=words(["Z"], [""]),
        EMBEDDING_BIAS_WEIGHTS=weights([1], [1]),
        BAD_WORDS_DICT=words(["Z"], [""]),
    )
    outputs = reader(tokenizer).read(sent)
    assert [len(biased(outputs, row)) for row in (0, 1)] == [1, 0]
    assert [len(unpack_word_list(each)) for each in outputs["BAD_WORDS_IDS"]] == [2, 0]


@pytest.mark.parametrize(
    "off",
    [
        {},
        {"EMBEDDING_BIAS_WORDS": words([""]), "EMBEDDING_BIAS_WEIGHTS": weights([5])},
        {"EMBEDDING_BIAS_WORDS": words([]), "EMBEDDING_BIAS_WEIGHTS": weights([])},
    ],
)
def test_no_words_make_tensorrt_llms_empty_bias(tokenizer: Tokenizer, off: dict[str, Any]) -> None:
    assert reader(tokenizer).read(source(**off))["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (
            {"EMBEDDING_BIAS_WORDS": words(["a", "b"]), "EMBEDDING_BIAS_WEIGHTS": weights([1])},
            "embedding_bias_words has 2 words and embedding_bias_weights 1 weights",
        ),
        ({"EMBEDDING_BIAS_WORDS": words(["a"])}, "embedding_bias_words has 1 words and .* 0 weights"),
        ({"EMBEDDING_BIAS_WEIGHTS": weights([1])}, "embedding_bias_words has 0 words and .* 1 weights"),
        (
            {"EMBEDDING_BIAS_WORDS": words(["a"]), "EMBEDDING_BIAS_WEIGHTS": weights([float("nan")])},
            "embedding_bias_weights holds nan",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": words(["a"]), "EMBEDDING_BIAS_WEIGHTS": weights([1001])},
            "embedding_bias_weights holds 1001.0: expected finite numbers in",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": words(["Z", "Z"]), "EMBEDDING_BIAS_WEIGHTS": weights([600, 600])},
            "embedding_bias_weights, added up for each token, holds 1200.0",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": words(["a" * 257]), "EMBEDDING_BIAS_WEIGHTS": weights([1])},
            "embedding_bias_words has an entry of 257 bytes: at most 256",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": words(["a"] * 1025), "EMBEDDING_BIAS_WEIGHTS": weights([0] * 1025)},
            "embedding_bias_words has 1025 entries: at most 1024",
        ),
        (
            {
                "EMBEDDING_BIAS_WORDS": np.array([[b"\xff"]], dtype=np.object_),
                "EMBEDDING_BIAS_WEIGHTS": weights([1]),
            },
            "embedding_bias_words is not valid UTF-8",
        ),
    ],
)
def test_bad_biases_are_named(tokenizer: Tokenizer, sent: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + message):
        reader(tokenizer).read(source(**sent))


def test_a_word_outside_the_models_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    sent = source(EMBEDDING_BIAS_WORDS=words(["<tool → call>"]), EMBEDDING_BIAS_WEIGHTS=weights([1]))
    with pytest.raises(InvalidRequestError, match=r"embedding_bias_words makes the token \d+: expected"):
        reader(tokenizer, vocab_size=300).read(sent)


@pytest.mark.parametrize("word", ["fox", " fox", "  fox"])
def test_spaces_before_a_bad_word_make_no_difference(tokenizer: Tokenizer, word: str) -> None:
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in ("fox", " fox")]
    assert tokenizer.encode_bad_word(word) == expected


def test_a_bad_word_of_spaces_stays_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_bad_word(" ")[0] == tokenizer.encode(" ", add_special_tokens=False)
    assert tokenizer.encode_bad_word("\n")[0] == tokenizer.encode("\n", add_special_tokens=False)


def test_the_largest_lists_of_words_are_taken(tokenizer: Tokenizer) -> None:
    many = [f"w{n}" for n in range(1024)]
    sent = source(
        BAD_WORDS_DICT=words(many),
        EMBEDDING_BIAS_WORDS=words(many),
        EMBEDDING_BIAS_WEIGHTS=weights([0.5] * 1024),
    )
    outputs = reader(tokenizer).read(sent)
    assert len(unpack_word_list(outputs["BAD_WORDS_IDS"][0])) == 2048
