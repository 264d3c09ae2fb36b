"""Drafts that are wrong, impossible or after the end of a text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from helpers.drafting_engines import break_token, engine_parts
from helpers.engine_drive import EngineDrive, solo_tokens
from helpers.tiny_models import make_tiny_model
from naiad.engine import Engine
from naiad.sequence import EngineRequest, FinishReason, SamplingParams, Sequence, TextContext
from naiad.speculation.drafter import TextDrafter
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

PROMPT = [7, 8, 9]
# Token n is two letters.
TABLE = TokenTable([bytes([97 + n % 26, 65 + n // 26]) for n in range(50)], {}, frozenset())


class RightDrafter(TextDrafter):
    """Drafts the tokens that the fake model will sample, and records the outputs of ended sequences."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []

    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return solo_tokens(sequence.token_ids, num_tokens)

    def num_read(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def forget(self, sequence: Sequence) -> None:
        self.outputs.append(sequence.output_token_ids)


def text_of(token_ids: list[int]) -> str:
    return b"".join(TABLE.visible_bytes(token_id, False) for token_id in token_ids).decode()


@pytest.mark.parametrize("kind", ["stop id", "stop sequence", "stop string", "one of two stop strings"])
def test_what_comes_after_the_end_was_not_accepted(kind: str) -> None:
    """The end is the 7th token, the third of the second window of five."""
    expected = solo_tokens(PROMPT, 20)
    stops: tuple[str, ...] = ()
    params = SamplingParams(max_tokens=20)
    if kind == "stop id":
        params = SamplingParams(max_tokens=20, stop_token_ids=(expected[6],))
    elif kind == "stop sequence":
        params = SamplingParams(max_tokens=20, stop_sequences=(tuple(expected[5:7]),))
    elif kind == "stop string":
        stops = (text_of(expected[5:7]),)
    else:
        stops = (text_of(expected[4:7]), text_of(expected[5:9]) + "never")
    drafter = RightDrafter()
    drive = EngineDrive(
        text_state=lambda context: TextStream(TABLE, context),
        make_drafter=lambda *_: drafter,
        num_speculative_tokens=4,
    )
    drive.add(1, PROMPT, params, TextContext(stop_strings=stops, prompt_tail_ids=tuple(PROMPT)))
    drive.run()
    assert drive.reason(1) is FinishReason.STOP
    assert drafter.outputs == [expected[:7]]
    stats = drive.engine.stats()
    # Four in the first window, two in the second.
    assert stats.total_accepted_tokens_at == [2, 2, 1, 1]
    assert drive.finals[1].num_accepted_tokens == 6
    assert stats.total_draft_tokens == drive.finals[1].num_draft_tokens == 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, tie_word_embeddings=False)
    return folder


def run(engine: Engine, offered: dict[int, tuple[int, ...]]) -> dict[int, list[int]]:
    """The tokens of six requests, each with a client's guess at them."""
    tokens: dict[int, list[int]] = {number: [] for number in range(6)}
    for number in tokens:
        params = SamplingParams(max_tokens=24, seed=number, temperature=number % 2, bad_words=((3,),))
        prompt = [5 + number] * (10 + number)
        draft = offered.get(number, ())
        engine.add_request(
            EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params, draft_token_ids=draft)
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error_message == ""
            tokens[output.sequence_id] += output.token_ids
    return tokens


def test_a_draft_that_is_not_finite_harms_nobody(folder: Path) -> None:
    """The model computes NaN for token 3, which it must not sample itself."""
    # A start cache's weights are mapped and cannot be changed.
    engine, runner = engine_parts(folder, num_blocks=24, start_cache=False)
    break_token(runner._model, 3)
    plain = run(engine, {})
    rng = random.Random(0)
    offered = {number: [*tokens] for number, tokens in plain.items()}
    for draft in offered.values():
        draft[rng.randrange(1, 20)] = 3
    assert run(engine, {number: tuple(draft) for number, draft in offered.items()}) == plain
    stats = engine.stats()
    assert 0 < sum(stats.total_accepted_tokens_at) < stats.total_draft_tokens
    for layer in runner._pool.layers:
        assert torch.isfinite(layer.key).all()
        assert torch.isfinite(layer.value).all()
