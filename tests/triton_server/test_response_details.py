"""Log-probabilities, logits and siblings in responses."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    FakeSource,
    llm_source,
)
from naiad.engine_process import Ack
from naiad.frontend.chunks import merged
from naiad.outputs import EngineStats, RequestOutput, TokenLogProbs
from naiad.sequence import FinishReason
from naiad.triton_server.service.llm_service import LLMService

VOCAB_SIZE = 5
TEXT = b'{"prompt_tail_ids": [7], "num_prompt_chars": 3}'


def logits(*rows: float) -> list[bytes]:
    return [np.full(VOCAB_SIZE, row, dtype="<f4").tobytes() for row in rows]


def output(sequence_id: int, *ids: int, finish: FinishReason | None = None, **more: Any) -> RequestOutput:
    """An output whose details are derived from its ids."""
    return RequestOutput(
        sequence_id,
        list(ids),
        finish_reason=finish,
        log_probs=[TokenLogProbs(-float(each), [each, each + 1], [-float(each), -99.0]) for each in ids],
        generation_logits=logits(*ids),
        **more,
    )


class Harness:
    """A service with a fake engine client that records its calls."""

    def __init__(self) -> None:
        self.engine = FakeEngineClient()
        self.service = LLMService(self.engine, pytest.fail, CountedIds(), LLM_SHAPE)
        self.sender = FakeSender()

    def run(self, source: FakeSource, *outputs: RequestOutput) -> list[dict[str, Any]]:
        """All responses to a request; a stream sends each output before the next one comes."""
        self.service.accept(source, self.sender, LIMITS)
        is_streaming = "streaming" in source.inputs
        for number, each in enumerate(outputs, 1):
            self.service.take_outputs([each], EngineStats())
            if is_streaming:
                self._wait_for(partial(self._has_sent, number))
        self.finish()
        assert [str(error) for error in self.sender.errors] == []
        return self.sender.responses

    def finish(self) -> None:
        """Wait for FINAL, then end the threads."""
        self._wait_for(lambda: self.sender.num_finals > 0)
        self.service.close()

    def _has_sent(self, num_responses: int) -> bool:
        return len(self.sender.responses) >= num_responses

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end_s, "waited in vain"
            time.sleep(0.002)


def joined(responses: list[dict[str, Any]], name: str, axis: int) -> Any:
    return np.concatenate([response[name] for response in responses if name in response], axis=axis)


ASK_ALL = {
    "return_log_probs": True,
    "num_log_probs": 2,
    "return_context_logits": True,
    "return_generation_logits": True,
}


def test_merged_outputs_keep_every_detail() -> None:
    context = logits(1, 2, 3)[0]
    both = merged(
        output(1, 10, 11, cum_log_prob=-21.0, context_logits=context), output(1, 12, cum_log_prob=-33.0)
    )
    assert [each.log_prob for each in both.log_probs] == [-10, -11, -12]
    assert both.generation_logits == logits(10, 11, 12)
    assert (both.cum_log_prob, both.context_logits) == (-33.0, context)


def test_a_response_has_tensorrt_llms_shapes() -> None:
    context = b"".join(logits(1, 2, 3))
    last = output(1, 11, finish=FinishReason.LENGTH, cum_log_prob=-21.0)
    (response,) = Harness().run(
        llm_source(**ASK_ALL), output(1, 10, cum_log_prob=-10.0, context_logits=context), last
    )
    assert response["output_ids"].tolist() == [[[5, 6, 7, 10, 11]]]
    assert response["output_log_probs"].tolist() == [[[-10.0, -11.0]]]
    assert response["cum_log_probs"].tolist() == [[-21.0]]
    assert response["top_log_prob_ids"].tolist() == [[[10, 11], [11, 12]]]
    assert response["top_log_probs"].tolist() == [[[-10.0, -99.0], [-11.0, -99.0]]]
    assert response["context_logits"].shape == (1, 3, VOCAB_SIZE)
    assert response["context_logits"][0, :, 0].tolist() == [1, 2, 3]
    assert response["generation_logits"].shape == (1, 1, 2, VOCAB_SIZE)
    assert response["generation_logits"][0, 0, :, 0].tolist() == [10, 11]
    kinds = {name: response[name].dtype for name in ("output_log_probs", "top_log_probs", "context_logits")}
    assert set(kinds.values()) == {np.dtype(np.float32)}
    assert response["top_log_prob_ids"].dtype == np.int32


DRAFTED = {"acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"}


@pytest.mark.parametrize(
    ("fields", "is_sent"),
    [
        ({}, False),
        ({"num_draft_tokens": 0}, False),
        ({"num_draft_tokens": 3}, True),
        ({"draft_input_ids": [4, 5]}, True),
        ({"return_perf_metrics": True}, True),
    ],
)
@pytest.mark.parametrize("num_drafts", [0, 8])
def test_only_who_asks_hears_of_drafts(fields: dict[str, Any], is_sent: bool, num_drafts: int) -> None:
    drafted = {"num_draft_tokens": num_drafts, "num_accepted_tokens": num_drafts // 4}
    outputs = (output(1, 10), output(1, 11, finish=FinishReason.LENGTH, **drafted))
    responses = Harness().run(llm_source(streaming=True, **fields), *outputs)
    assert [DRAFTED & response.keys() for response in responses] == [
        DRAFTED if "return_perf_metrics" in fields else set(),
        DRAFTED if is_sent else set(),
    ]
    if is_sent:
        assert responses[-1]["total_draft_tokens"].tolist() == [[num_drafts]]
        assert responses[-1]["acceptance_rate"].tolist() == [[0.25 if num_drafts else 0.0]]


def test_streamed_details_add_up_to_the_unstreamed_ones() -> None:
    context = b"".join(logits(1, 2, 3))
    outputs = (
        output(1, 10, cum_log_prob=-10.0, context_logits=context),
        output(1, 11, cum_log_prob=-21.0),
        output(1, finish=FinishReason.STOP, cum_log_prob=-21.0),
    )
    streamed = Harness().run(llm_source(streaming=True, **ASK_ALL), *outputs)
    (whole,) = Harness().run(llm_source(**ASK_ALL), *outputs)
    axes = {"output_log_probs": 2, "top_log_prob_ids": 1, "top_log_probs": 1, "generation_logits": 2}
    for name, axis in axes.items():
        assert joined(streamed, name, axis).tolist() == whole[name].tolist()
    assert streamed[-1]["cum_log_probs"].tolist() == whole["cum_log_probs"].tolist() == [[-21.0]]


def test_context_logits_come_with_the_first_and_the_last_response() -> None:
    context = b"".join(logits(1, 2, 3))
    outputs = (
        output(1, 10, context_logits=context),
        output(1, 11),
        output(1, 12, finish=FinishReason.STOP),
    )
    streamed = Harness().run(llm_source(streaming=True, return_context_logits=True), *outputs)
    assert ["context_logits" in response for response in streamed] == [True, False, True]
    first, last = (streamed[place]["context_logits"] for place in (0, 2))
    assert first.tolist() == last.tolist()
    assert first[0, :, 0].tolist() == [1, 2, 3]


def test_a_last_response_without_tokens_has_empty_details() -> None:
    end = output(1, finish=FinishReason.STOP)
    (response,) = Harness().run(llm_source(streaming=True, **ASK_ALL), end)
    assert response["output_log_probs"].shape == (1, 1, 0)
    assert response["top_log_prob_ids"].shape == response["top_log_probs"].shape == (1, 0, 2)
    assert "generation_logits" not in response
    assert "context_logits" not in response


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, set()),
        ({"return_log_probs": True}, {"output_log_probs", "cum_log_probs"}),
        ({"num_log_probs": 2}, {"top_log_prob_ids", "top_log_probs"}),
        ({"return_generation_logits": True}, {"generation_logits"}),
    ],
)
def test_only_what_was_asked_for_is_sent(asked: dict[str, Any], names: set[str]) -> None:
    (response,) = Harness().run(llm_source(**asked), output(1, 10, finish=FinishReason.LENGTH))
    assert set(response) == {"output_ids", "sequence_length"} | names


def test_details_coalesce_while_the_window_is_full() -> None:
    harness = Harness()
    source = llm_source(streaming=True, text_context=TEXT, **ASK_ALL)
    harness.service.accept(source, harness.sender, LIMITS)
    (stream,) = harness.service.open_streams()
    (row,) = stream.rows
    row.outstanding = 2
    for token in (12, 13, 14):
        harness.service.take_outputs([output(1, token, cum_log_prob=-float(token))], EngineStats())
    assert harness.sender.responses == []
    harness.service.take_acks([Ack(1, 1, False)])
    harness.service.take_outputs([output(1, finish=FinishReason.STOP, cum_log_prob=-14.0)], EngineStats())
    harness.finish()
    assert joined(harness.sender.responses, "output_log_probs", 2).tolist() == [[[-12, -13, -14]]]
    assert joined(harness.sender.responses, "generation_logits", 2)[0, 0, :, 0].tolist() == [12, 13, 14]
    assert harness.sender.responses[0]["cum_log_probs"].item() == -14


def test_siblings_go_to_the_engine_as_one_request() -> None:
    harness = Harness()
    source = llm_source(num_return_sequences=3, cache_salt=b"tenant")
    doubled = {name: np.repeat(tensor, 2, axis=0) for name, tensor in source.inputs.items()}
    harness.service.accept(FakeSource(doubled), harness.sender, LIMITS)
    ids = [(each.sequence_id, each.sibling_ids) for each in harness.engine.submitted]
    assert ids == [(1, (2, 3)), (4, (5, 6))]
    assert {each.cache_salt for each in harness.engine.submitted} == {"tenant"}
    harness.service.close()


def test_every_sibling_answers_and_the_last_carries_final() -> None:
    source = llm_source(num_return_sequences=3, return_num_output_tokens=True, return_finish_reason=True)
    responses = Harness().run(
        source,
        output(2, 20, 21, finish=FinishReason.LENGTH),
        output(1, 10, finish=FinishReason.STOP),
        output(3, 30, finish=FinishReason.LENGTH),
    )
    said = {
        response["sequence_index"].item(): (
            response["output_ids"].reshape(-1).tolist()[3:],
            response["num_output_tokens"].item(),
            response["finish_reason"].item(),
        )
        for response in responses
    }
    assert said == {0: ([10], 1, b"stop"), 1: ([20, 21], 2, b"length"), 2: ([30], 1, b"length")}
    assert all("batch_index" not in response for response in responses)


def test_rows_and_siblings_are_told_apart() -> None:
    source = llm_source(num_return_sequences=2)
    doubled = {name: np.repeat(tensor, 2, axis=0) for name, tensor in source.inputs.items()}
    responses = Harness().run(
        FakeSource(doubled), *(output(n, 10 * n, finish=FinishReason.LENGTH) for n in (1, 2, 3, 4))
    )
    places = [(r["batch_index"].item(), r["sequence_index"].item()) for r in responses]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_streamed_siblings_travel_apart() -> None:
    responses = Harness().run(
        llm_source(num_return_sequences=2, streaming=True),
        output(1, 10),
        output(2, 20),
        output(1, 11, finish=FinishReason.LENGTH),
        output(2, finish=FinishReason.STOP),
    )
    ids: dict[int, list[int]] = {0: [], 1: []}
    for response in responses:
        ids[response["sequence_index"].item()] += response["output_ids"].reshape(-1).tolist()
    assert ids == {0: [10, 11], 1: [20]}


def test_one_sequence_has_no_sequence_index() -> None:
    (response,) = Harness().run(llm_source(num_return_sequences=1), output(1, 10, finish=FinishReason.LENGTH))
    assert "sequence_index" not in response


def test_a_cancel_ends_the_whole_group() -> None:
    harness = Harness()
    source = llm_source(num_return_sequences=3, streaming=True)
    harness.service.accept(source, harness.sender, LIMITS)
    harness.service.take_outputs([output(2, 20, finish=FinishReason.STOP)], EngineStats())
    harness.sender.cancelled = True
    harness.service.housekeep()
    assert set(harness.engine.aborted) >= {1, 3}
    harness.service.take_outputs([output(n, finish=FinishReason.CANCELLED) for n in (1, 3)], EngineStats())
    harness.finish()
    assert harness.sender.num_finals == 1


def test_one_failing_sibling_fails_the_request() -> None:
    harness = Harness()
    harness.service.accept(llm_source(num_return_sequences=2), harness.sender, LIMITS)
    harness.service.take_outputs(
        [RequestOutput(2, [], finish_reason=FinishReason.ERROR, error_status="INTERNAL", error_message="x")],
        EngineStats(),
    )
    assert set(harness.engine.aborted) >= {1}
    harness.finish()
    assert [str(error) for error in harness.sender.errors] == ["x"]
