from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    FakeSource,
    let_senders_finish,
    llm_source,
)
from naiad.engine_process import Ack, Instance
from naiad.errors import NaiadError, UnavailableError, place_of
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason
from naiad.triton_server.responses.short_chunk import ShortChunk
from naiad.triton_server.service.llm_service import LLMService

TEXT = b'{"prompt_tail_ids": [7], "num_prompt_chars": 3}'


class Harness:
    """A service over a fake engine."""

    def __init__(self) -> None:
        self.engine = FakeEngineClient()
        self.logged: list[str] = []
        self.service = LLMService(self.engine, self.logged.append, CountedIds(), LLM_SHAPE)

    def accept(self, source: FakeSource) -> FakeSender:
        sender = FakeSender()
        self.service.accept(source, sender, LIMITS)
        return sender

    def say(self, *outputs: RequestOutput) -> None:
        self.service.take_outputs(outputs, EngineStats())

    def ack(self, sequence_id: int, cancelled: bool = False) -> None:
        self.service.take_acks([Ack(sequence_id, 1, cancelled)])


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.service.close()


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.002)


def done(sequence_id: int, ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> RequestOutput:
    return RequestOutput(sequence_id, ids, finish_reason=reason)


def text_source(**tensors: object) -> FakeSource:
    return llm_source(text_context=TEXT, streaming=True, **tensors)


def test_streamed_tokens_are_deltas_with_one_final(harness: Harness) -> None:
    sender = harness.accept(llm_source(streaming=True))
    harness.say(RequestOutput(1, [10]))
    eventually(lambda: len(sender.responses) == 1)
    harness.say(done(1, [11]))
    eventually(lambda: sender.num_finals == 1)
    assert [r["output_ids"].tolist() for r in sender.responses] == [[[[10]]], [[[11]]]]


def test_unstreamed_answer_holds_prompt_and_all_tokens(harness: Harness) -> None:
    sender = harness.accept(llm_source())
    harness.say(RequestOutput(1, [10]))
    harness.say(done(1, [11]))
    eventually(lambda: sender.num_finals == 1)
    assert [r["output_ids"].tolist() for r in sender.responses] == [[[[5, 6, 7, 10, 11]]]]


def test_excluded_prompt_is_left_out(harness: Harness) -> None:
    sender = harness.accept(llm_source(exclude_input_in_output=True))
    harness.say(done(1, [10, 11]))
    eventually(lambda: sender.num_finals == 1)
    assert sender.responses[0]["output_ids"].tolist() == [[[10, 11]]]


def test_refused_request_gets_one_error_and_final(harness: Harness) -> None:
    sender = harness.accept(llm_source(temperature=-1.0))
    assert [str(e) for e in sender.errors] == ["temperature = -1.0: expected a finite number ≥ 0"]
    assert sender.num_finals == 1
    assert harness.engine.submitted == []


def test_unexpected_fault_fails_only_its_own_request(harness: Harness) -> None:
    sender = harness.accept(FakeSource({"input_ids": object(), "input_lengths": object()}))
    assert [str(e) for e in sender.errors] == ["internal error while reading the request"]
    assert "input_ids" not in str(sender.errors[0])
    (line,) = harness.logged
    assert re.fullmatch(
        r"naiad: a request failed with \w+ at [\w.]+/\w+\.py:\d+( < [\w.]+/\w+\.py:\d+)*", line
    )


def test_an_output_that_can_not_be_taken_fails_only_its_own_request(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_of = harness.service._error_of

    def fail_or_find(output: RequestOutput) -> NaiadError | None:
        if output.sequence_id == 1:
            raise KeyError("a secret detail")
        return error_of(output)

    monkeypatch.setattr(harness.service, "_error_of", fail_or_find)
    failing, served = harness.accept(llm_source()), harness.accept(llm_source(exclude_input_in_output=True))
    harness.say(RequestOutput(1, [10]), done(2, [11]))
    eventually(lambda: failing.num_finals == served.num_finals == 1)
    assert [str(e) for e in failing.errors] == ["internal error while answering the request"]
    assert harness.engine.aborted == [1]
    assert served.responses[0]["output_ids"].tolist() == [[[11]]]
    (line,) = harness.logged
    assert line.startswith("naiad: an output could not be taken: KeyError at triton_server/test_")


def test_the_log_has_the_place_of_a_fault_and_not_what_it_says() -> None:
    """What it says may be a part of a prompt."""
    with pytest.raises(KeyError, match="quinquereme") as caught:
        {}["quinquereme"]
    assert re.fullmatch(r"KeyError at triton_server/test_llm_service\.py:\d+", place_of(caught.value))


def test_engine_that_restarts_is_unavailable_at_once(harness: Harness) -> None:
    harness.engine.error = UnavailableError("the engine is restarting")
    sender = harness.accept(llm_source())
    eventually(lambda: sender.num_finals == 1)
    assert isinstance(sender.errors[0], UnavailableError)
    eventually(lambda: harness.service.open_streams() == [])


def test_loss_of_the_engine_during_submit_answers_once(harness: Harness) -> None:
    def lose_and_refuse(_: object) -> None:
        harness.service.engine_lost()
        raise UnavailableError("the engine is restarting")

    harness.engine.submit = lose_and_refuse  # type: ignore[method-assign]
    sender = harness.accept(llm_source())
    eventually(lambda: sender.num_finals == 1)
    eventually(lambda: harness.service.open_streams() == [])
    assert len(sender.errors) == 1


def test_cancel_during_submit_reaches_the_engine_after_the_rows(harness: Harness) -> None:
    def cancel_then_take(requests: list[EngineRequest]) -> None:
        sender.cancelled = True
        harness.service.housekeep()
        harness.engine.aborted.clear()
        harness.engine.submitted += requests

    harness.engine.submit = cancel_then_take  # type: ignore[method-assign]
    sender = FakeSender()
    harness.service.accept(llm_source(), sender, LIMITS)
    assert harness.engine.aborted == [1]


def test_late_chunks_travel_together_when_the_window_is_full(harness: Harness) -> None:
    sender = harness.accept(text_source())
    for token in (10, 11):
        harness.say(RequestOutput(1, [token], window_ids=[7]))
        eventually(lambda n=token - 9: len(sender.responses) == n)
    for token in (12, 13, 14):
        harness.say(RequestOutput(1, [token], window_ids=[token - 1]))
    let_senders_finish(harness.service)
    assert len(sender.responses) == 2
    harness.ack(1)
    eventually(lambda: len(sender.responses) == 3)
    assert list(sender.responses[2]) == ["text_chunk"]
    assert ShortChunk.read(sender.responses[2]["text_chunk"]) == ShortChunk(1, [11, 12, 13, 14], 3)


def test_an_acknowledgement_is_wanted_while_the_window_is_full(harness: Harness) -> None:
    wanted = threading.Event()
    harness.service.want_acks = wanted.set
    sender = harness.accept(text_source())
    for token in (10, 11):
        harness.say(RequestOutput(1, [token], window_ids=[7]))
        eventually(lambda n=token - 9: len(sender.responses) == n)
    let_senders_finish(harness.service)
    assert not wanted.is_set()
    assert not harness.service.needs_acks
    harness.say(RequestOutput(1, [12], window_ids=[7]))
    let_senders_finish(harness.service)
    assert wanted.is_set()
    assert harness.service.needs_acks
    harness.ack(1)
    let_senders_finish(harness.service)
    assert len(sender.responses) == 3
    assert not harness.service.needs_acks


def test_messages_of_the_engine_and_housekeeping_bring_acknowledgements(harness: Harness) -> None:
    sender = harness.accept(text_source())
    waiting: list[Ack] = []
    harness.service.read_acks = lambda: harness.service.take_acks([waiting.pop() for _ in list(waiting)])
    (stream,) = harness.service.open_streams()
    for bring in (lambda: harness.say(RequestOutput(1, [11], window_ids=[7])), harness.service.housekeep):
        harness.say(RequestOutput(1, [10], window_ids=[7]))
        let_senders_finish(harness.service)
        waiting.append(Ack(1, stream.rows[0].outstanding, False))
        bring()
        let_senders_finish(harness.service)
        assert waiting == []
    assert stream.rows[0].outstanding == 0
    assert len(sender.responses) == 3


def test_last_chunk_does_not_wait_for_acknowledgements(harness: Harness) -> None:
    sender = harness.accept(text_source())
    for token in (10, 11):
        harness.say(RequestOutput(1, [token], window_ids=[7]))
        eventually(lambda n=token - 9: len(sender.responses) == n)
    harness.say(done(1, [12]))
    eventually(lambda: sender.num_finals == 1)
    assert sender.responses[-1]["is_last"].item()


def test_error_waits_for_outstanding_chunks(harness: Harness) -> None:
    sender = harness.accept(text_source())
    harness.say(RequestOutput(1, [10], window_ids=[7]))
    eventually(lambda: len(sender.responses) == 1)
    failed = RequestOutput(
        1, [], finish_reason=FinishReason.ERROR, error_status="INTERNAL", error_message="bad row"
    )
    harness.say(failed)
    let_senders_finish(harness.service)
    assert sender.num_finals == 0
    harness.ack(1)
    eventually(lambda: sender.num_finals == 1)
    assert [str(e) for e in sender.errors] == ["bad row"]


def test_cut_text_counts_the_merged_chunks(harness: Harness) -> None:
    sender = harness.accept(llm_source(text_context=TEXT))
    harness.say(RequestOutput(1, [10], window_ids=[7], num_chars=4))
    harness.say(
        RequestOutput(1, [11], window_ids=[10], num_chars=2, is_cut=True, finish_reason=FinishReason.STOP)
    )
    eventually(lambda: sender.num_finals == 1)
    response = sender.responses[0]
    assert response["max_chars"].item() == 3 + 4 + 2
    assert response["window_ids"].tolist() == [[5, 6, 7, 10, 11]]
    assert response["num_emitted_tokens"].item() == 0


def test_silent_ensemble_stream_is_probed_until_its_client_is_gone(harness: Harness) -> None:
    sender = harness.accept(text_source())

    def probed() -> bool:
        harness.service.housekeep()
        return len(sender.responses) == 1

    eventually(probed)
    assert ShortChunk.read(sender.responses[0]["text_chunk"]) == ShortChunk(1, [], 0)
    harness.ack(1, cancelled=True)
    assert harness.engine.aborted == [1]


def test_direct_streams_cancellation_reaches_the_engine_once(harness: Harness) -> None:
    sender = harness.accept(llm_source(streaming=True))
    sender.cancelled = True
    harness.service.housekeep()
    harness.service.housekeep()
    assert harness.engine.aborted == [1]


@pytest.mark.parametrize("end", [done(1, [11]), done(1, [], FinishReason.CANCELLED)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancel_before_the_last_token_leaves_one_final(
    harness: Harness, streaming: bool, end: RequestOutput
) -> None:
    """The engine has had its last token already, or cancels."""
    sender = harness.accept(llm_source(streaming=streaming))
    sender.cancelled = True
    harness.service.housekeep()
    assert harness.engine.aborted == [1]
    harness.say(end)
    eventually(lambda: sender.num_finals == 1)
    harness.service.housekeep()
    let_senders_finish(harness.service)
    assert (sender.num_finals, sender.errors, harness.engine.aborted) == (1, [], [1])
    assert harness.service.open_streams() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cancel_after_the_last_token_leaves_one_final(harness: Harness, streaming: bool) -> None:
    """The engine may still be told of it; it does not know the sequence any more."""
    sender = harness.accept(llm_source(streaming=streaming))
    harness.say(done(1, [11]))
    sender.cancelled = True
    harness.service.housekeep()
    eventually(lambda: sender.num_finals == 1)
    harness.service.housekeep()
    let_senders_finish(harness.service)
    assert (sender.num_finals, sender.errors) == (1, [])
    assert harness.service.open_streams() == []


def test_stop_cancels_all_requests_of_the_id_and_answers_with_a_bare_final(harness: Harness) -> None:
    for name in ("a", "b", "a"):
        source = llm_source()
        source.request_id = name
        harness.accept(source)
    stop = llm_source(stop=True)
    stop.request_id = "a"
    sender = harness.accept(stop)
    assert sorted(harness.engine.aborted) == [1, 3]
    # Requests of other frontends may have the same id.
    assert harness.engine.stopped == ["a"]
    assert (sender.num_finals, sender.responses, sender.errors) == (1, [], [])


def test_probe_of_the_supervisor_touches_nothing(harness: Harness) -> None:
    probe = llm_source(stop=True)
    probe.request_id = "naiad-probe"
    sender = harness.accept(probe)
    assert sender.num_finals == 1
    assert (harness.engine.submitted, harness.engine.aborted, harness.engine.stopped) == ([], [], [])


def test_lost_engine_ends_every_stream_with_an_error(harness: Harness) -> None:
    senders = [harness.accept(llm_source(streaming=True)) for _ in range(5)]
    harness.service.engine_lost()
    for sender in senders:
        eventually(lambda s=sender: s.num_finals == 1)
        assert len(sender.errors) == 1
    eventually(lambda: harness.service.open_streams() == [])


def test_one_failing_row_ends_the_request_and_aborts_the_others(harness: Harness) -> None:
    source = llm_source(streaming=True)
    for name in list(source.inputs):
        source.inputs[name] = source.inputs[name].repeat(2, axis=0)
    sender = harness.accept(source)
    harness.say(
        RequestOutput(2, [], finish_reason=FinishReason.ERROR, error_status="INTERNAL", error_message="x")
    )
    eventually(lambda: sender.num_finals == 1)
    assert 1 in harness.engine.aborted


def test_rows_finish_apart_and_the_last_carries_final(harness: Harness) -> None:
    source = llm_source()
    for name in list(source.inputs):
        source.inputs[name] = source.inputs[name].repeat(2, axis=0)
    sender = harness.accept(source)
    harness.say(done(2, [10]))
    eventually(lambda: len(sender.responses) == 1)
    assert sender.num_finals == 0
    harness.say(done(1, [11]))
    eventually(lambda: sender.num_finals == 1)
    assert [r["batch_index"].item() for r in sender.responses] == [1, 0]


def test_a_failure_of_ours_while_handing_over_ends_the_stream_once(harness: Harness) -> None:
    def fail(requests: list[EngineRequest]) -> None:
        raise OverflowError("a secret detail")

    harness.engine.submit = fail  # type: ignore[method-assign]
    sender = harness.accept(llm_source())
    eventually(lambda: sender.num_finals == 1)
    assert [str(error) for error in sender.errors] == ["internal error while reading the request"]
    eventually(lambda: not harness.service.open_streams())
    harness.service.housekeep()
    assert sender.num_finals == 1


def test_ids_can_not_be_guessed() -> None:
    engine = FakeEngineClient()
    service = LLMService(engine, pytest.fail, Instance(Path(), "llm", 0).draw_first_id, LLM_SHAPE)
    for _ in range(20):
        service.accept(llm_source(), FakeSender(), LIMITS)
    ids = [request.sequence_id for request in engine.submitted]
    service.close()
    assert len(set(ids)) == 20
    assert max(ids) < 2**63
    # With 52 random bits, twenty ids are neither small nor close to each other.
    assert min(abs(one - other) for one in ids for other in ids if one != other) > 2**24
