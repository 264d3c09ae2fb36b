"""Random requests over all fields, each streamed, in one piece, and through `text`, on a real engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.openai_api import CHAT, COMPLETIONS, Said, streamed, whole
from helpers.openai_requests import comparable, drawn_body, fields_of, text_fields
from helpers.openai_stack import Stack, openai_stack
from helpers.tiny_repository import tiny_checkpoint

MODEL = "tiny"
NUM_REQUESTS = 100
# Without these the answers would be equal by chance.
LEAST_TEXTS = 0.25


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with openai_stack(tiny_checkpoint(tmp_path_factory.mktemp("random_requests") / MODEL)) as running:
        yield running


def content(asked: dict[str, Any], said: Said) -> list[str]:
    """The texts without an echo."""
    prompt = asked["prompt"] if asked.get("echo") else ""
    assert all(text.startswith(prompt) for text in said.texts)
    return [text[len(prompt) :] for text in said.texts]


def check_usage(said: Said, asked: dict[str, Any]) -> None:
    usage = said.usage
    assert usage["completion_tokens"] == sum(map(len, said.token_ids))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= len(said.texts) * asked.get(
        "max_completion_tokens", asked["max_tokens"]
    )


def check(stack: Stack, path: str, number: int) -> Counter[str]:
    """Check one request; return what it covered."""
    asked = drawn_body(random.Random(f"{path} {number}"), path)
    print(number, asked)
    found = streamed(stack, path, **asked, model=MODEL)
    expected = whole(stack, path, **asked, model=MODEL)
    assert comparable(found) == comparable(expected)
    for values, others in zip(found.log_probs, expected.log_probs, strict=True):
        assert values == pytest.approx(others, abs=1e-4)
    check_usage(found, asked)
    covered = Counter(asked.keys())
    if (fields := text_fields(asked)) is not None:
        request = stack.text.read(fields)
        assert found.usage["prompt_tokens"] == request.num_prompt_tokens
        assert content(asked, found) == stack.text.texts(fields)
        covered["text"] += any(content(asked, found))
    return covered


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_whole_and_text_agree(stack: Stack, path: str) -> None:
    covered: Counter[str] = Counter()
    for number in range(NUM_REQUESTS):
        covered += check(stack, path, number)
    assert fields_of(path) - covered.keys() == set()
    assert covered["text"] >= LEAST_TEXTS * NUM_REQUESTS
