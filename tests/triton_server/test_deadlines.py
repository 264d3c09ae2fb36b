"""When deadlines pass, the client gets an error only if no part of its request has started."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    llm_source,
)
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason
from naiad.triton_server.service.llm_service import LLMService

MESSAGE = "timeout: the request was not started within its time limit"


@pytest.fixture
def service() -> Iterator[LLMService]:
    made = LLMService(FakeEngineClient(), [].append, CountedIds(), LLM_SHAPE)
    yield made
    made.close()


def timed_out(sequence_id: int, ids: list[int]) -> RequestOutput:
    return RequestOutput(sequence_id, ids, finish_reason=FinishReason.TIMEOUT)


def never_started(sequence_id: int) -> RequestOutput:
    output = timed_out(sequence_id, [])
    output.error_status, output.error_message = "UNAVAILABLE", MESSAGE
    return output


def ask(service: LLMService, streaming: bool) -> FakeSender:
    sender = FakeSender()
    source = llm_source(num_return_sequences=3, streaming=streaming, return_finish_reason=True)
    service.accept(source, sender, LIMITS)
    return sender


def wait_final(sender: FakeSender) -> None:
    end_s = time.monotonic() + 30
    while not sender.num_finals:
        assert time.monotonic() < end_s, "no FINAL"
        time.sleep(0.002)


@pytest.mark.parametrize("streaming", [True, False])
def test_one_that_started_lets_the_others_end_without_tokens(service: LLMService, streaming: bool) -> None:
    sender = ask(service, streaming)
    service.take_outputs([never_started(3), never_started(2), timed_out(1, [10, 11])], EngineStats())
    wait_final(sender)
    assert sender.errors == []
    reasons = {r["sequence_index"].item(): r["finish_reason"].item() for r in sender.responses}
    assert reasons == dict.fromkeys(range(3), b"timeout")
    assert sum(r["output_ids"].size for r in sender.responses if r["sequence_index"].item() == 0) >= 2


def test_queued_sequences_get_no_response_before_one_has_started(
    service: LLMService,
) -> None:
    sender = ask(service, streaming=True)
    service.take_outputs([never_started(2), never_started(3)], EngineStats())
    service.take_outputs([never_started(1)], EngineStats())
    wait_final(sender)
    assert sender.responses == []
    assert [str(error) for error in sender.errors] == [MESSAGE]
