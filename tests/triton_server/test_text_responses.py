"""Text responses of a service that has no detokenizer model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import (
    LIMITS,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    FakeSource,
    let_senders_finish,
)
from naiad.errors import CancelledError
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.prompt import PromptEncoder
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason
from naiad.tokenization import TextStream, Tokenizer
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.responses.text import TextWriter
from naiad.triton_server.service.llm_service import LLMService, RequestShape

PROMPT, ANSWER = "The quick", " brown 你好 fox"


class Harness:
    """A service of the `text` model with a fake engine client that records its calls."""

    def __init__(self, tokenizer: Tokenizer, accumulates: bool, cancel_message: str = "") -> None:
        encoder = PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size)
        texts = ChunkTexts(tokenizer.table)
        shape = RequestShape(
            read=TextRequestReader(encoder).read,
            build=TextWriter(texts, accumulates=accumulates).write,
            cancel_message=cancel_message,
        )
        self.tokenizer = tokenizer
        self.engine = FakeEngineClient()
        self.service = LLMService(self.engine, pytest.fail, CountedIds(), shape)

    def ask(self, *prompts: str, **fields: Any) -> FakeSender:
        sender = FakeSender()
        rows = len(prompts)
        inputs: dict[str, Any] = {
            "text_input": np.array([[each.encode()] for each in prompts], dtype=np.object_),
            "max_tokens": np.full((rows, 1), 20, dtype=np.int32),
        }
        inputs |= {name: np.array([[value]] * rows) for name, value in fields.items()}
        self.service.accept(FakeSource(inputs), sender, LIMITS)
        return sender

    def say(self, sequence_id: int, text: str, *, index: int = -1) -> None:
        """Send the engine's outputs of a whole answer, one token each, with the ids its text depends on."""
        request = self.engine.submitted[index]
        assert request.text is not None
        stream = TextStream(self.tokenizer.table, request.text)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for place, token_id in enumerate(ids):
            is_last = place == len(ids) - 1
            chunk = stream.push([token_id], is_last)
            reason = FinishReason.LENGTH if is_last else None
            output = RequestOutput(sequence_id, chunk.token_ids, chunk.window_ids, finish_reason=reason)
            self.service.take_outputs([output], EngineStats())
            let_senders_finish(self.service)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")))


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(accumulates: bool = False, cancel_message: str = "") -> Harness:
        made.append(Harness(tokenizer, accumulates, cancel_message))
        return made[-1]

    yield build
    for each in made:
        each.service.close()


def finished(sender: FakeSender) -> list[dict[str, Any]]:
    end_s = time.monotonic() + 30
    while not sender.num_finals:
        assert time.monotonic() < end_s, "no FINAL"
        time.sleep(0.002)
    return sender.responses


def texts_of(responses: list[dict[str, Any]]) -> list[str]:
    assert all(each["text_output"].shape == (1,) for each in responses)
    return [each["text_output"].item().decode() for each in responses]


def test_streamed_texts_are_deltas(make: Callable[..., Harness]) -> None:
    harness = make()
    sender = harness.ask(PROMPT, stream=True)
    harness.say(1, ANSWER)
    texts = texts_of(finished(sender))
    assert len(texts) > 2
    assert "".join(texts) == ANSWER


def test_accumulated_texts_hold_all_so_far(make: Callable[..., Harness]) -> None:
    harness = make(accumulates=True)
    sender = harness.ask(PROMPT, stream=True)
    harness.say(1, ANSWER)
    texts = texts_of(finished(sender))
    assert texts[-1] == ANSWER
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) > 2


def test_an_unstreamed_text_follows_its_prompt(make: Callable[..., Harness]) -> None:
    harness = make(accumulates=True)
    sender = harness.ask(PROMPT)
    harness.say(1, ANSWER)
    assert texts_of(finished(sender)) == [PROMPT + ANSWER]


def test_rows_are_told_apart(make: Callable[..., Harness]) -> None:
    harness = make()
    sender = harness.ask(PROMPT, "A", stream=True)
    harness.say(2, " two", index=1)
    harness.say(1, " one", index=0)
    texts = {0: "", 1: ""}
    for response in finished(sender):
        texts[response["batch_index"].item()] += response["text_output"].item().decode()
    assert texts == {0: " one", 1: " two"}


def test_the_steps_internal_tensors_are_not_sent(make: Callable[..., Harness]) -> None:
    harness = make()
    sender = harness.ask(PROMPT, stream=True, return_finish_reason=True, return_num_output_tokens=True)
    harness.say(1, " fox")
    for response in finished(sender):
        assert set(response) == {"text_output", "finish_reason", "stop_reason", "num_output_tokens"}


def test_clients_are_polled_and_not_probed(make: Callable[..., Harness]) -> None:
    harness = make()
    sender = harness.ask(PROMPT, stream=True)
    sender.cancelled = True
    time.sleep(0.1)
    harness.service.housekeep()
    let_senders_finish(harness.service)
    assert (sender.responses, harness.engine.aborted) == ([], [1])


def test_the_loss_of_an_engine_ends_its_own_streams_alone(make: Callable[..., Harness]) -> None:
    harness = make()
    lost, other = harness.ask(PROMPT), harness.ask(PROMPT)
    harness.service.engine_lost([1, 99])
    finished(lost)
    assert ["engine process ended" in str(error) for error in lost.errors] == [True]
    harness.say(2, " fox")
    assert texts_of(finished(other)) == [PROMPT + " fox"]


def test_a_cancel_may_be_an_error(make: Callable[..., Harness]) -> None:
    harness = make(cancel_message="Request was cancelled")
    sender = harness.ask(PROMPT, stream=True)
    cancelled = RequestOutput(1, [], finish_reason=FinishReason.CANCELLED)
    harness.service.take_outputs([cancelled], EngineStats())
    finished(sender)
    assert [(type(error), str(error)) for error in sender.errors] == [
        (CancelledError, "Request was cancelled")
    ]
