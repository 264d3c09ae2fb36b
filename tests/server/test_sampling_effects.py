"""The effect of each sampling parameter on the tokens, through the real server and by each protocol.

The responses include the model's raw logits. The definitions of docs/sampling.md, applied to them here,
determine the tokens that could be drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer

from helpers.served import WAYS, served
from helpers.server import Server
from naiad.tokenization import pack_word_list

VOCABULARY = 49152
# After this prompt greedy decoding repeats itself.
PROMPT = "1, 2, 3, 1, 2, 3, 1, 2,"
NUM_TOKENS = 10
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)

Logits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """The position of a token: all ids before it, and the raw logits [vocab]."""

    prompt: list[int]
    output: list[int]
    logits: Logits


@dataclass(frozen=True)
class Effect:
    """Fields of a request, and a function that returns the ids that are possible at a position."""

    fields: dict[str, Any]
    possible: Callable[[Place], set[int]]


def best(logits: Logits) -> set[int]:
    return {int(logits.argmax())}


def penalized(place: Place) -> set[int]:
    logits = place.logits.copy()
    for token_id in {*place.prompt, *place.output}:
        logits[token_id] = logits[token_id] / 1.5 if logits[token_id] > 0 else logits[token_id] * 1.5
    return best(logits)


def less_often(presence: float, frequency: float) -> Callable[[Place], set[int]]:
    def possible(place: Place) -> set[int]:
        logits = place.logits.copy()
        for token_id, count in Counter(place.output).items():
            logits[token_id] -= presence + frequency * count
        return best(logits)

    return possible


def biased(biases: dict[int, float]) -> Callable[[Place], set[int]]:
    def possible(place: Place) -> set[int]:
        logits = place.logits.copy()
        for token_id, bias in biases.items():
            logits[token_id] += bias
        return best(logits)

    return possible


def without(token_ids: list[int], num_tokens: int) -> Callable[[Place], set[int]]:
    def possible(place: Place) -> set[int]:
        logits = place.logits.copy()
        if len(place.output) < num_tokens:
            logits[token_ids] = -np.inf
        return best(logits)

    return possible


def only(token_ids: list[int]) -> Callable[[Place], set[int]]:
    return lambda place: {max(token_ids, key=lambda token_id: place.logits[token_id])}


def heated(place: Place) -> Logits:
    """The probabilities at temperature 2."""
    weights = np.exp((place.logits - place.logits.max()) / 2.0)
    return weights / weights.sum()


def within(place: Place, top_p: float) -> set[int]:
    order = np.argsort(-heated(place))
    sums = heated(place)[order].cumsum()
    return set(order[: int((sums < top_p).sum()) + 1].tolist())


def of_top_p(place: Place) -> set[int]:
    return within(place, 0.6)


def of_decaying_top_p(place: Place) -> set[int]:
    top_p = 0.9
    for token_id in place.output:
        top_p = 0.9 if token_id == RESET_ID else max(top_p * 0.5, 0.2)
    return within(place, top_p)


def of_min_p(place: Place) -> set[int]:
    probabilities = heated(place)
    return set(np.flatnonzero(probabilities >= 0.1 * probabilities.max()).tolist())


def of_top_k(place: Place) -> set[int]:
    return set(np.argsort(-place.logits)[:3].tolist())


RESET_ID = 28
DECAY = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_min": 0.2, "top_p_reset_ids": RESET_ID}
BIASES = {33: 6.0, 30: -3.0, 34: 4.5}
HOT = {"temperature": 2.0, "seed": 7}
EFFECTS = {
    "greedy": Effect({}, lambda place: best(place.logits)),
    "repetition_penalty": Effect({"repetition_penalty": 1.5}, penalized),
    "presence_penalty": Effect({"presence_penalty": 5.0}, less_often(5.0, 0.0)),
    "frequency_penalty": Effect({"frequency_penalty": 3.0}, less_often(0.0, 3.0)),
    "logit_bias": Effect(
        {"logit_bias_ids": list(BIASES), "logit_bias_values": list(BIASES.values())}, biased(BIASES)
    ),
    "allowed_token_ids": Effect({"allowed_token_ids": [55, 66, 77]}, only([55, 66, 77])),
    "min_tokens": Effect({"min_tokens": 5, "stop_token_ids": [30, 28]}, without([30, 28], 5)),
    "min_length": Effect({"min_length": 5, "stop_token_ids": [30, 28]}, without([30, 28], 5)),
    "top_k": Effect(HOT | {"top_k": 3}, of_top_k),
    "top_p": Effect(HOT | {"top_p": 0.6}, of_top_p),
    "top_p_decay": Effect(HOT | DECAY, of_decaying_top_p),
    "min_p": Effect(HOT | {"min_p": 0.1}, of_min_p),
}


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode(PROMPT)
    return ids


@pytest.fixture(scope="module")
def ids_of(server: Server, prompt: list[int]) -> Callable[[str], list[int]]:
    """Returns the checked ids of an effect; each effect is requested once."""
    found: dict[str, list[int]] = {}

    def ask(name: str) -> list[int]:
        if name not in found:
            found[name] = checked_ids(server, prompt, EFFECTS[name])
        return found[name]

    return ask


def checked_ids(server: Server, prompt: list[int], effect: Effect) -> list[int]:
    requested = {"max_tokens": NUM_TOKENS, "return_generation_logits": True}
    answer = served(server, "grpc", prompt, **effect.fields, **requested)
    rows = np.array(answer.all("generation_logits")).reshape(-1, VOCABULARY)
    ids = answer.token_ids
    assert len(rows) == len(ids) > 4
    for index, token_id in enumerate(ids):
        assert token_id in effect.possible(Place(prompt, ids[:index], rows[index])), index
    return ids


def said(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    whole: str = tokenizer.decode(prompt + ids)
    return whole.removeprefix(PROMPT)


@pytest.mark.parametrize("name", sorted(EFFECTS.keys() - {"greedy"}))
def test_the_drawn_token_follows_the_definition(ids_of: Callable[[str], list[int]], name: str) -> None:
    assert ids_of(name) != ids_of("greedy")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EFFECTS)
def test_each_protocol_draws_the_same(
    server: Server,
    tokenizer: Any,
    prompt: list[int],
    ids_of: Callable[[str], list[int]],
    name: str,
    way: str,
) -> None:
    fields = EFFECTS[name].fields | {"max_tokens": NUM_TOKENS}
    if way == "generate":
        assert served(server, way, prompt, **fields).token_ids == ids_of(name)
    else:
        assert served(server, way, PROMPT, **fields).text == said(tokenizer, prompt, ids_of(name))


@pytest.mark.parametrize("way", WAYS)
def test_another_seed_draws_other_tokens(
    server: Server, prompt: list[int], ids_of: Callable[[str], list[int]], way: str
) -> None:
    fields = EFFECTS["top_p"].fields | {"max_tokens": NUM_TOKENS, "seed": 2**64 - 1}
    assert served(server, way, prompt, **fields).token_ids != ids_of("top_p")


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_of_the_whole_vocabulary(server: Server, prompt: list[int], way: str) -> None:
    row = [0.0] * VOCABULARY
    row[77] = 100.0
    assert served(server, way, prompt, max_tokens=3, embedding_bias=row).token_ids == [77] * 3


@pytest.mark.parametrize("way", WAYS)
def test_packed_bad_words(
    server: Server, prompt: list[int], ids_of: Callable[[str], list[int]], way: str
) -> None:
    pair = ids_of("greedy")[1:3]
    packed = pack_word_list([pair])
    words: Any = packed[None] if way == "grpc" else packed.reshape(-1).tolist()
    ids = served(server, way, prompt, max_tokens=NUM_TOKENS, bad_words_list=words).token_ids
    assert ids[:2] == ids_of("greedy")[:2]
    assert pair not in [ids[place : place + 2] for place in range(len(ids))]


@pytest.mark.parametrize("way", WAYS)
def test_ids_that_end_a_text(
    server: Server, prompt: list[int], ids_of: Callable[[str], list[int]], way: str
) -> None:
    greedy = ids_of("greedy")
    end_id, requested = greedy[2], {"max_tokens": NUM_TOKENS, "return_finish_reason": True}
    for fields in ({"stop_token_ids": [end_id]}, {"end_id": end_id}):
        answer = served(server, way, prompt, **fields, **requested)
        assert answer.token_ids == greedy[:2]
        assert (answer.end("finish_reason"), answer.end("stop_reason")) == ("stop", str(end_id))
    answer = served(server, way, prompt, end_id=end_id, ignore_eos=True, **requested)
    assert (answer.token_ids, answer.end("finish_reason")) == (greedy, "length")


@pytest.mark.parametrize("way", WAYS)
def test_the_models_own_end_is_ignored_when_asked(server: Server, way: str) -> None:
    requested = {"max_tokens": 12, "return_finish_reason": True, "return_num_output_tokens": True}
    ended = served(server, way, CHAT, **requested)
    assert (ended.text, ended.end("finish_reason")) == ("The capital of France is Paris.", "stop")
    whole = served(server, way, CHAT, ignore_eos=True, **requested)
    assert (whole.end("finish_reason"), sum(whole.all("num_output_tokens"))) == ("length", 12)
    assert whole.text.startswith(ended.text)
