"""Beam search: which requests are allowed, and the single response with all beams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    FakeEngineClient,
    FakeSender,
    FakeSource,
    llm_source,
)
from naiad.engine_process import Ack
from naiad.errors import InvalidRequestError
from naiad.frontend.request import GenerateRequest
from naiad.outputs import EngineStats, RequestOutput, TokenLogProbs, error_output
from naiad.sequence import BeamParams, FinishReason
from naiad.tokenization import TokenTable, pack_word_list
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.responses.detokenizer import decode_beams, split_beams
from naiad.triton_server.responses.short_chunk import ShortChunk
from naiad.triton_server.service.llm_service import LLMService

TEXT = b'{"prompt_tail_ids": [7], "num_prompt_chars": 3}'


def read(**sent: Any) -> GenerateRequest:
    request = read_request(llm_source(**sent), LIMITS)
    assert isinstance(request, GenerateRequest)
    return request


def beam(sequence_id: int, *ids: int, reason: FinishReason = FinishReason.STOP, **more: Any) -> RequestOutput:
    """A result whose details are derived from its ids."""
    log_probs = [TokenLogProbs(-float(each)) for each in ids]
    score = -float(sequence_id)
    return RequestOutput(
        sequence_id, list(ids), finish_reason=reason, log_probs=log_probs, cum_log_prob=score, **more
    )


class Harness:
    """A service with a fake engine client that records its calls; ids count from 1."""

    def __init__(self) -> None:
        self.engine = FakeEngineClient()
        self.service = LLMService(self.engine, pytest.fail, lambda _: 1, LLM_SHAPE)
        self.sender = FakeSender()

    def accept(self, source: FakeSource) -> None:
        self.service.accept(source, self.sender, LIMITS)
        assert [str(error) for error in self.sender.errors] == []

    def say(self, *outputs: RequestOutput) -> None:
        self.service.take_outputs(outputs, EngineStats())

    def finish(self) -> list[dict[str, Any]]:
        """Wait for FINAL; return all responses."""
        eventually(lambda: self.sender.num_finals == 1)
        eventually(lambda: self.service.open_streams() == [])
        return self.sender.responses

    def run(self, source: FakeSource, *outputs: RequestOutput) -> list[dict[str, Any]]:
        self.accept(source)
        self.say(*outputs)
        return self.finish()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.service.close()


def eventually(condition: Any) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.002)


def doubled(source: FakeSource) -> FakeSource:
    return FakeSource({name: np.repeat(tensor, 2, axis=0) for name, tensor in source.inputs.items()})


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, BeamParams(length_penalty=0.0, stops_early=True)),
        ({"len_penalty": 1.5}, BeamParams(length_penalty=1.5, stops_early=True)),
        ({"early_stopping": False}, BeamParams(length_penalty=0.0, stops_early=False)),
        ({"parameters": {"length_penalty": -2, "early_stopping": False}}, BeamParams(length_penalty=-2.0)),
        (
            {"beam_search_diversity_rate": 0.5},
            BeamParams(length_penalty=0.0, stops_early=True, diversity_rate=0.5),
        ),
    ],
)
def test_a_search_has_tensorrt_llms_defaults(sent: dict[str, Any], expected: BeamParams) -> None:
    assert read(beam_width=4, **sent).rows[0].beam == expected


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"beam_width": 1},
        {"len_penalty": 0.0},
        {"beam_width": 1, "len_penalty": 1.0, "early_stopping": False, "beam_search_diversity_rate": 0.0},
    ],
)
def test_off_is_no_search(sent: dict[str, Any]) -> None:
    request = read(**sent)
    assert request.rows[0].beam is None
    assert request.outputs.num_sequences == 1


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"len_penalty": 0.5}, "len_penalty = 0.5: expected 0.0 or 1.0 without beams (beam_width > 1)"),
        ({"early_stopping": True}, "early_stopping = True: expected False without beams"),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate = 0.5: expected 0.0 without beams"),
        ({"beam_width": 1, "len_penalty": 2.0}, "len_penalty = 2.0"),
        ({"len_penalty": 10.5}, "len_penalty = 10.5: expected a finite number ≥ -10 and ≤ 10"),
        ({"len_penalty": float("nan")}, "len_penalty = nan"),
        ({"early_stopping": 1}, "early_stopping = 1: expected true or false"),
    ],
)
def test_fields_of_a_search_need_one(sent: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**sent)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"streaming": True}, "streaming = True is not supported with beam_width = 3"),
        ({"temperature": 0.7}, "temperature = 0.7: expected 0.0 or 1.0 with beam_width = 3"),
        ({"runtime_top_k": 2}, "runtime_top_k = 2: expected 0 or 1 with beam_width = 3"),
        ({"runtime_top_p": 0.5}, "runtime_top_p = 0.5: expected 1.0 or at most 0.0 with beam_width = 3"),
        ({"min_p": 0.1}, "min_p = 0.1: expected 0.0 with beam_width = 3"),
        ({"num_return_sequences": 4}, "num_return_sequences = 4: expected at most 3 with beam_width = 3"),
        ({"num_log_probs": 1}, "num_log_probs = 1 is not supported with beam_width = 3"),
        ({"return_context_logits": True}, "return_context_logits = True is not supported"),
        ({"return_generation_logits": True}, "return_generation_logits = True is not supported"),
        (
            {"runtime_top_p": 1.0, "runtime_top_p_decay": 0.5},
            "runtime_top_p_decay = 0.5: expected 1.0",
        ),
        ({"stop_words_list": pack_word_list([[8, 9]])[None]}, "stop_words_list is not supported"),
    ],
)
def test_fields_that_beams_do_not_support_are_named(sent: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(beam_width=3, **sent)
    assert str(refused.value).startswith(named)


def test_fields_without_effect_on_beams_are_accepted() -> None:
    sent = {"temperature": 1.0, "runtime_top_k": 1, "runtime_top_p": 1.0, "min_p": 0.0, "seed": 5}
    empty_words = np.zeros((1, 2, 0), dtype=np.int32)
    params = read(beam_width=3, streaming=False, stop_words_list=empty_words, **sent).rows[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)


def test_rows_may_differ_in_penalty_but_not_in_width() -> None:
    source = doubled(llm_source(beam_width=2, len_penalty=np.float32([[1.0]])))
    source.inputs["len_penalty"][1] = 2.0
    request = read_request(source, LIMITS)
    assert isinstance(request, GenerateRequest)
    assert [row.beam and row.beam.length_penalty for row in request.rows] == [1.0, 2.0]
    source.inputs["beam_width"][1] = 3
    with pytest.raises(InvalidRequestError, match=r"^beam_width differs between the rows"):
        read_request(source, LIMITS)


@pytest.mark.parametrize("num_return_sequences", [{}, {"num_return_sequences": 1}])
def test_each_row_goes_to_the_engine_as_one_search(harness: Harness, num_return_sequences: Any) -> None:
    harness.accept(doubled(llm_source(beam_width=3, return_log_probs=True, **num_return_sequences)))
    asked = harness.engine.submitted
    assert [(each.sequence_id, each.sibling_ids) for each in asked] == [(1, (2, 3)), (4, (5, 6))]
    assert {each.beam for each in asked} == {BeamParams(length_penalty=0.0, stops_early=True)}
    assert {each.params.num_log_probs for each in asked} == {0}


def test_one_response_has_all_beams(harness: Harness) -> None:
    outputs = {"return_log_probs": True, "return_finish_reason": True, "return_num_output_tokens": True}
    source = llm_source(beam_width=3, return_num_input_tokens=True, **outputs)
    last = beam(3, 13, reason=FinishReason.LENGTH)
    best = beam(1, 10, 11, stop_reason="2")
    (response,) = harness.run(source, last, best, beam(2))
    assert response["output_ids"].tolist() == [[[5, 6, 7, 10, 11], [5, 6, 7, -1, -1], [5, 6, 7, 13, -1]]]
    assert response["sequence_length"].tolist() == [[5, 3, 4]]
    assert response["cum_log_probs"].tolist() == [[-1, -2, -3]]
    assert response["output_log_probs"].tolist() == [[[-10, -11], [0, 0], [-13, 0]]]
    assert response["finish_reason"].tolist() == [[b"stop"]]
    assert response["stop_reason"].tolist() == [[b"2"]]
    assert response["num_input_tokens"].tolist() == [[3]]
    assert response["num_output_tokens"].tolist() == [[3]]
    names = {"output_ids", "sequence_length", "cum_log_probs", "output_log_probs"}
    kinds = {np.dtype(np.int32), np.dtype(np.float32)}
    assert {response[name].dtype for name in names} == kinds
    assert {"sequence_index", "batch_index", "window_ids"}.isdisjoint(response)


def test_fewer_beams_may_be_sent(harness: Harness) -> None:
    source = llm_source(beam_width=3, num_return_sequences=2, exclude_input_in_output=True)
    (response,) = harness.run(source, beam(1, 10), beam(2, 11, 12), beam(3, 13, 14, 15))
    assert response["output_ids"].tolist() == [[[10, -1], [11, 12]]]
    assert response["sequence_length"].tolist() == [[1, 2]]


def test_a_search_without_any_text_has_empty_beams(harness: Harness) -> None:
    source = llm_source(beam_width=2, exclude_input_in_output=True, return_log_probs=True)
    (response,) = harness.run(source, *(beam(n, reason=FinishReason.CANCELLED) for n in (1, 2)))
    assert response["output_ids"].shape == response["output_log_probs"].shape == (1, 2, 0)


def test_rows_are_told_apart_and_have_one_final(harness: Harness) -> None:
    harness.accept(doubled(llm_source(beam_width=2, exclude_input_in_output=True)))
    harness.say(beam(3, 30), beam(4, 40))
    eventually(lambda: len(harness.sender.responses) == 1)
    assert harness.sender.num_finals == 0
    harness.say(beam(1, 10))
    harness.say(beam(2, 20))
    said = {each["batch_index"].item(): each["output_ids"].tolist() for each in harness.finish()}
    assert said == {1: [[[30], [40]]], 0: [[[10], [20]]]}


@pytest.mark.parametrize("is_excluded", [True, False])
def test_a_detokenizer_gets_the_window_and_a_cut_for_each_beam(harness: Harness, is_excluded: bool) -> None:
    source = llm_source(beam_width=2, text_context=TEXT, exclude_input_in_output=is_excluded)
    cut = beam(2, 12, window_ids=[7], num_chars=4, is_cut=True)
    (response,) = harness.run(source, beam(1, 10, 11, window_ids=[7]), cut)
    assert response["sequence_id"].tolist() == [[1]]
    assert response["is_last"].tolist() == [[True]]
    assert response["window_ids"].tolist() == ([[7]] if is_excluded else [[]])
    assert response["num_emitted_tokens"].tolist() == [[int(is_excluded)]]
    assert response["max_chars"].tolist() == [[-1]]
    assert response["beam_max_chars"].tolist() == [[-1, 4 if is_excluded else 7]]


def test_a_search_without_outputs_is_probed(harness: Harness) -> None:
    harness.accept(llm_source(beam_width=2, text_context=TEXT))
    time.sleep(0.1)
    harness.service.housekeep()
    eventually(lambda: len(harness.sender.responses) == 1)
    (probe,) = harness.sender.responses
    assert ShortChunk.read(probe["text_chunk"]) == ShortChunk(1, [], 0)
    harness.service.take_acks([Ack(1, 1, True)])
    assert harness.engine.aborted == [1]
    harness.say(*(beam(n, reason=FinishReason.CANCELLED) for n in (1, 2)))
    assert len(harness.finish()) == 2


def test_a_cancel_of_a_direct_client_ends_the_search(harness: Harness) -> None:
    harness.accept(llm_source(beam_width=3))
    harness.sender.cancelled = True
    harness.service.housekeep()
    assert harness.engine.aborted == [1]


def test_an_error_of_one_beam_is_the_requests(harness: Harness) -> None:
    harness.accept(llm_source(beam_width=2))
    harness.say(error_output(2, "INTERNAL", "bad row"), error_output(1, "INTERNAL", "bad row"))
    harness.finish()
    assert [str(error) for error in harness.sender.errors] == ["bad row"]


@pytest.fixture(scope="module")
def table() -> TokenTable:
    """Ids 0 … 4: "a", " b", a special token, and the two bytes of "é"."""
    return TokenTable([b"a", b" b", b"<s>", b"\xc3", b"\xa9"], {1: b"b"}, frozenset({2}))


def chunk(ids: list[list[int]], lengths: list[int], window: list[int], cuts: list[int]) -> dict[str, Any]:
    named = {"TOKENS_BATCH": [ids], "SEQUENCE_LENGTH": [lengths], "window_ids": [window]}
    return {
        name: np.array(each, dtype=np.int32) for name, each in (named | {"beam_max_chars": [cuts]}).items()
    }


def test_each_beam_continues_after_the_window(table: TokenTable) -> None:
    tensors = chunk([[1, 0, 1], [4, -1, -1], [0, 2, 3]], [3, 1, 3], [3], [-1, -1, 1])
    assert decode_beams(table, tensors, True) == ["\ufffd ba b", "é", "\ufffd"]


def test_a_beam_without_a_window_begins_a_text(table: TokenTable) -> None:
    assert decode_beams(table, chunk([[1, 1], [0, 2]], [2, 2], [], [2, -1]), True) == ["b ", "a"]


def test_a_length_for_each_beam_is_needed(table: TokenTable) -> None:
    with pytest.raises(InvalidRequestError, match=r"^SEQUENCE_LENGTH has 1 values for 2 rows"):
        split_beams(np.zeros((1, 2, 3), dtype=np.int32), np.array([[3]]))
    with pytest.raises(InvalidRequestError, match=r"^beam_max_chars has 1 values for 2 rows"):
        decode_beams(table, chunk([[1], [1]], [1, 1], [], [-1]), True)


def test_beams_without_a_token_have_no_ids() -> None:
    """A beam search that is cancelled before its first token."""
    assert split_beams(np.zeros((1, 2, 0), dtype=np.int32), np.array([[0, 0]])) == [[], []]
