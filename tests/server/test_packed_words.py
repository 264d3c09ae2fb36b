"""Word lists in TensorRT-LLM's packed form: made by the tokenizer, and sent by direct clients of `llm`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.contract_models import VOCABULARY
from helpers.manual_chain import NAIAD_STEPS, TRTLLM_STEPS, by_hand
from helpers.preset_server import PAD_TOKEN, Tensors, stream
from helpers.raw_grpc import as_tensor, ask, llm_inputs, text_inputs
from helpers.server import Server
from helpers.tiny_tokenizers import byte_level_tokenizer
from naiad.tokenization import pack_word_list

PROMPT = "The quick brown"
NUM_TOKENS = 24
TOKENIZER = byte_level_tokenizer()
EOS_ID, PAD_ID = TOKENIZER.token_to_id("</s>"), TOKENIZER.token_to_id(PAD_TOKEN)
TOKENIZERS = ("tokenizer", "classic_preprocessing", "unary_preprocessing")
LLMS = ("llm", "classic_tensorrt_llm", "unary_tensorrt_llm")
CHAINS = {
    "naiad": NAIAD_STEPS,
    "trtllm": tuple(f"classic_{step}" for step in TRTLLM_STEPS),
    "unary": tuple(f"unary_{step}" for step in TRTLLM_STEPS),
}


@pytest.fixture(scope="module")
def made(presets: Server) -> list[int]:
    """Greedy ids after the prompt, with nothing that ends them."""
    ids = ask(presets.grpc, "llm", llm_inputs(encoded(PROMPT), NUM_TOKENS, ignore_eos=True)).token_ids
    assert len(ids) == NUM_TOKENS
    return ids


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def rows(*texts: list[str]) -> Any:
    return np.array([[word.encode() for word in row] for row in texts], dtype=np.object_)


def tokenized(server: Server, model: str, **words: Any) -> Tensors:
    query = rows([PROMPT], ["It's"])
    lengths = np.array([[3], [4]], dtype=np.int32)
    return stream(server, model, {"QUERY": query, "REQUEST_OUTPUT_LEN": lengths, **words})


@pytest.mark.parametrize("model", TOKENIZERS)
def test_words_are_packed_and_padded_to_the_longest_row(presets: Server, model: str) -> None:
    words = rows(["stop", ""], ["fox", "e"])
    outputs = tokenized(presets, model, STOP_WORDS_DICT=words, BAD_WORDS_DICT=words)
    stop, fox, e = (encoded(word) for word in ("stop", "fox", "e"))
    assert (len(stop), len(fox), len(e)) == (1, 2, 1)
    assert outputs["STOP_WORDS_IDS"].dtype == np.int32
    assert outputs["STOP_WORDS_IDS"].tolist() == [[[*stop, 0, 0], [1, -1, -1]], [[*fox, *e], [2, 3, -1]]]
    # Each word at the beginning of a text and after a space.
    spaced = [encoded(f" {word}") for word in ("stop", "fox", "e")]
    first = [stop, spaced[0]]
    second = [fox, spaced[1], e, spaced[2]]
    assert unpacked(outputs["BAD_WORDS_IDS"][0]) == first
    assert unpacked(outputs["BAD_WORDS_IDS"][1]) == second
    num_ids = sum(len(word) for word in second)
    assert outputs["BAD_WORDS_IDS"].shape == (2, 2, num_ids)
    assert set(outputs["BAD_WORDS_IDS"][0, 0, sum(len(word) for word in first) :].tolist()) == {0}


def unpacked(words: Any) -> list[list[int]]:
    """Unpack by the definition: offsets are the words' ends, −1 is padding."""
    ends = [end for end in words[1].tolist() if end != -1]
    assert words[1].tolist() == ends + [-1] * (words.shape[1] - len(ends))
    return [words[0, start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("model", TOKENIZERS)
def test_without_words_the_lists_are_empty(presets: Server, model: str) -> None:
    outputs = tokenized(presets, model)
    assert outputs["STOP_WORDS_IDS"].shape == outputs["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    alone = stream(presets, model, {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 3})
    assert alone["STOP_WORDS_IDS"].shape == alone["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert alone["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize("model", TOKENIZERS)
def test_biased_words_become_a_row_of_the_whole_vocabulary(presets: Server, model: str) -> None:
    weights = np.array([[2.5, -1.0], [0.0, 0.0]], dtype=np.float32)
    words = rows(["fox", "e"], ["", ""])
    bias = tokenized(presets, model, EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    expected = np.zeros((2, VOCABULARY), dtype=np.float32)
    expected[0, encoded("fox")] = 2.5
    expected[0, encoded("e")] = -1.0
    assert bias["EMBEDDING_BIAS"].tolist() == expected.tolist()


@pytest.mark.parametrize("model", TOKENIZERS)
def test_ids_of_end_and_padding_are_the_checkpoints_unless_sent(presets: Server, model: str) -> None:
    outputs = tokenized(presets, model)
    # Without a separate padding token, the end-of-text token is used.
    pad_id = PAD_ID if model == "classic_preprocessing" else EOS_ID
    assert outputs["OUT_END_ID"].tolist() == [[EOS_ID]] * 2
    assert outputs["OUT_PAD_ID"].tolist() == [[pad_id]] * 2
    long, short = encoded(PROMPT), encoded("It's")
    assert outputs["INPUT_ID"].tolist() == [long, short + [pad_id] * (len(long) - len(short))]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(long)], [len(short)]]
    ids = {name: np.array([[7], [8]], dtype=np.int32) for name in ("END_ID", "PAD_ID")}
    outputs = tokenized(presets, model, **ids)
    assert outputs["OUT_END_ID"].tolist() == outputs["OUT_PAD_ID"].tolist() == [[7], [8]]


# Ranges of the undisturbed output from which the words are taken.
STOPS = {
    "one id": [(5, 6)],
    "two ids": [(5, 7)],
    "the one that comes first": [(13, 15), (7, 10)],
    "the second of them": [(20, 23), (2, 5), (12, 14)],
}


@pytest.mark.parametrize(
    ("model", "is_streamed"), [*((model, False) for model in LLMS), *((model, True) for model in LLMS[:2])]
)
@pytest.mark.parametrize("case", STOPS)
def test_a_packed_stop_word_ends_the_ids(
    presets: Server, made: list[int], model: str, case: str, is_streamed: bool
) -> None:
    words = [made[start:end] for start, end in STOPS[case]]
    fields = {"streaming": is_streamed, "return_finish_reason": True, "ignore_eos": True}
    inputs = llm_inputs(encoded(PROMPT), NUM_TOKENS, **fields, stop_words_list=pack_word_list(words)[None])
    outcome = ask(presets.grpc, model, inputs)
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert outcome.token_ids == upto(made, words)
    reasons = [response["finish_reason"].item() for response in outcome.responses]
    assert reasons == [b""] * (len(reasons) - 1) + [b"stop"]
    if case == "one id":
        assert outcome.responses[-1]["stop_reason"].item() == str(made[5]).encode()


def upto(ids: list[int], words: list[list[int]]) -> list[int]:
    """The ids up to and including the first word."""
    end = next(n for n in range(len(ids)) if any(ids[:n][-len(word) :] == word for word in words))
    assert 0 < end < len(ids)
    return ids[:end]


@pytest.mark.parametrize("model", LLMS[:2])
def test_each_row_has_its_own_words(presets: Server, made: list[int], model: str) -> None:
    words = np.zeros((3, 2, 3), dtype=np.int32)
    words[:, 1] = -1
    words[0, :, :1] = pack_word_list([made[5:6]])
    words[1] = pack_word_list([made[7:10]])
    inputs = llm_inputs(encoded(PROMPT), NUM_TOKENS, ignore_eos=True)
    inputs = {name: np.repeat(as_tensor(value), 3, axis=0) for name, value in inputs.items()}
    outcome = ask(presets.grpc, model, inputs | {"stop_words_list": words})
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for response in outcome.responses:
        found[response["batch_index"].item()] += response["output_ids"].reshape(-1).tolist()
    assert found == {0: upto(made, [made[5:6]]), 1: upto(made, [made[7:10]]), 2: made}


@pytest.mark.parametrize("model", LLMS)
def test_packed_bad_words_are_never_made(presets: Server, made: list[int], model: str) -> None:
    pair, single = made[1:3], made[5:6]
    inputs = llm_inputs(encoded(PROMPT), NUM_TOKENS, ignore_eos=True, streaming=False)
    outcome = ask(presets.grpc, model, inputs | {"bad_words_list": pack_word_list([pair, single])[None]})
    ids = outcome.token_ids
    assert len(ids) == NUM_TOKENS
    assert single[0] not in ids
    assert pair not in [ids[at : at + 2] for at in range(NUM_TOKENS)]
    # The first half of a pair is not banned; nothing changes before the pair is complete.
    assert ids[:2] == made[:2]
    assert pair[0] in ids


def test_with_a_text_context_its_strings_count(presets: Server, made: list[int]) -> None:
    context = stream(presets, "tokenizer", {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 3})["text_context"]
    words = pack_word_list([made[5:6]])[None]
    inputs = llm_inputs(encoded(PROMPT), NUM_TOKENS, ignore_eos=True, streaming=False, stop_words_list=words)
    assert ask(presets.grpc, "llm", inputs).token_ids == made[:6]
    assert ask(presets.grpc, "llm", inputs | {"text_context": context}).token_ids == made


# By the names of `text`.
WORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "stop words": {"stop_words": ["op", "pac"]},
    "bad words": {"bad_words": ["世", "们"]},
    "biases": {"embedding_bias_words": ["fox"], "embedding_bias_weights": [30.0]},
    "all": {
        "stop_words": ["xfoxx", "x"],
        "bad_words": ["pac"],
        "embedding_bias_words": ["fox"],
        "embedding_bias_weights": [30.0],
    },
}
NAMES = {
    "stop_words": "STOP_WORDS_DICT",
    "bad_words": "BAD_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}


@pytest.mark.parametrize("case", WORDS)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_without_text_context_gives_the_text(presets: Server, chain: str, case: str) -> None:
    words = WORDS[case]
    plain = text_inputs(PROMPT, NUM_TOKENS, ignore_eos=True, stream=False, exclude_input_in_output=False)
    # The ids of a packed stop word stay in the output.
    expected = ask(presets.grpc, "text", plain | words | {"include_stop_str_in_output": True}).text
    assert (expected == ask(presets.grpc, "text", plain).text) == (case == "none")
    query = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": NUM_TOKENS}
    query |= {NAMES[name]: value for name, value in words.items()}
    more = {"ignore_eos": True, "exclude_input_in_output": False}
    found = by_hand(lambda model, inputs: stream(presets, model, inputs), CHAINS[chain], query, more)
    assert found == [expected]
