"""Log-probabilities and logits of responses, by each protocol and from both models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.contract_models import VOCABULARY
from helpers.raw_grpc import ask, llm_inputs, text_inputs
from helpers.served import WAYS, Answer, served
from helpers.server import Server

PROMPT = "The capital of France is"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def prompt_ids(tiny_dir: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(tiny_dir).encode(PROMPT)
    return ids


@pytest.fixture(scope="module")
def known(tiny: Server, prompt_ids: list[int]) -> Answer:
    """Greedy tokens with the model's raw logits."""
    requested = {"return_context_logits": True, "return_generation_logits": True}
    return served(tiny, "grpc", prompt_ids, max_tokens=NUM_TOKENS, **requested)


@pytest.fixture(scope="module")
def known_log_probs(known: Answer) -> Any:
    """The log-probabilities of all ids at each new token, [tokens, vocab], computed from the logits."""
    rows = np.array(known.all("generation_logits")).reshape(-1, VOCABULARY)
    assert rows.argmax(axis=1).tolist() == known.token_ids
    shifted = rows - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def prompt_for(model: str, prompt_ids: list[int]) -> str | list[int]:
    return PROMPT if model == "ensemble" else prompt_ids


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_log_probs_are_those_of_the_logits(
    tiny: Server, prompt_ids: list[int], known: Answer, known_log_probs: Any, model: str, way: str
) -> None:
    requested = {"return_log_probs": True, "num_log_probs": 3}
    answer = served(tiny, way, prompt_for(model, prompt_ids), max_tokens=NUM_TOKENS, **requested)
    own = known_log_probs[range(NUM_TOKENS), known.token_ids]
    assert answer.all("output_log_probs") == pytest.approx(own.tolist(), abs=1e-3)
    assert answer.end("cum_log_probs") == pytest.approx(own.sum(), abs=1e-3)
    best_ids = np.argsort(-known_log_probs, axis=1)[:, :3]
    assert answer.all("top_log_prob_ids") == best_ids.reshape(-1).tolist()
    best = np.take_along_axis(known_log_probs, best_ids, axis=1)
    assert answer.all("top_log_probs") == pytest.approx(best.reshape(-1).tolist(), abs=1e-3)


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_shapes(tiny: Server, prompt_ids: list[int], model: str) -> None:
    requested = {"return_log_probs": True, "num_log_probs": 3}
    inputs = (
        llm_inputs(prompt_ids, NUM_TOKENS, **requested, streaming=False)
        if model == "llm"
        else text_inputs(PROMPT, NUM_TOKENS, **requested | {"stream": False})
    )
    (whole,) = ask(tiny.grpc, model, inputs).responses
    shapes = {name: whole[name].shape for name in ("output_log_probs", "top_log_probs", "top_log_prob_ids")}
    assert shapes == {
        "output_log_probs": (1, 1, NUM_TOKENS),
        "top_log_probs": (1, NUM_TOKENS, 3),
        "top_log_prob_ids": (1, NUM_TOKENS, 3),
    }
    assert whole["cum_log_probs"].shape == (1, 1)


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_do_not_depend_on_sampling(tiny: Server, prompt_ids: list[int], way: str) -> None:
    """They are raw: the only allowed token has a low log-probability."""
    requested = {"return_log_probs": True, "num_log_probs": 1, "max_tokens": 1}
    plain = served(tiny, way, prompt_ids, **requested)
    forced = served(tiny, way, prompt_ids, allowed_token_ids=[77], temperature=3.0, **requested)
    assert forced.token_ids == [77]
    assert forced.all("top_log_prob_ids") == plain.token_ids
    assert forced.all("top_log_probs") == pytest.approx(plain.all("output_log_probs"), abs=1e-3)
    assert forced.all("output_log_probs")[0] < -5


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_with_a_text_that_ends_by_itself(tiny: Server, known: Answer, way: str) -> None:
    """The last streamed response has no tokens; its details are empty."""
    stop_id = known.token_ids[3]
    requested = {"return_log_probs": True, "num_log_probs": 1}
    answer = served(tiny, way, PROMPT, stop_token_ids=[stop_id], **requested)
    num_tokens = known.token_ids.index(stop_id)
    assert len(answer.all("output_log_probs")) == len(answer.all("top_log_probs")) == num_tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_logits_of_prompt_and_output(
    tiny: Server, prompt_ids: list[int], known: Answer, model: str, way: str
) -> None:
    requested = {"return_context_logits": True, "return_generation_logits": True}
    answer = served(tiny, way, prompt_for(model, prompt_ids), max_tokens=2, **requested)
    context = np.array(answer.all("context_logits")).reshape(-1, VOCABULARY)
    generated = np.array(answer.all("generation_logits")).reshape(-1, VOCABULARY)
    if len(context) > len(prompt_ids):  # the last response of a stream repeats them
        context, again = np.split(context, 2)
        assert context.tolist() == again.tolist()
    assert (len(context), len(generated)) == (len(prompt_ids), 2)
    np.testing.assert_allclose(context[-1], generated[0], atol=1e-3)
    for name, rows in (("context_logits", context), ("generation_logits", generated)):
        expected = np.array(known.all(name)[: rows.size]).reshape(-1, VOCABULARY)
        np.testing.assert_allclose(rows, expected, atol=1e-3)
