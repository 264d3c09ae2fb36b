"""A detokenizer that died or hangs: its streams end, each with one FINAL, and hold no blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    let_senders_finish,
    llm_source,
)
from naiad.engine_process import Ack
from naiad.errors import UnavailableError
from naiad.outputs import EngineStats, RequestOutput
from naiad.triton_server.responses import stream
from naiad.triton_server.service import llm_service
from naiad.triton_server.service.llm_service import DEAD_DETOKENIZER_S, LLMService

_TEXT = b'{"prompt_tail_ids": [7], "num_prompt_chars": 3}'


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (llm_service, stream):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def service(engine: FakeEngineClient, clock: Clock) -> Iterator[LLMService]:
    service = LLMService(engine, lambda _line: None, CountedIds(), LLM_SHAPE)
    yield service
    service.close()


def begin(service: LLMService) -> FakeSender:
    """A stream whose first chunk is out, and not acknowledged."""
    sender = FakeSender()
    service.accept(llm_source(text_context=_TEXT, streaming=True), sender, LIMITS)
    first_id = service.open_streams()[-1].rows[0].sequence_id
    service.take_outputs([RequestOutput(first_id, [10], window_ids=[7])], EngineStats())
    let_senders_finish(service)
    assert len(sender.responses) == 1
    return sender


def test_streams_of_a_dead_detokenizer_end(
    service: LLMService, engine: FakeEngineClient, clock: Clock
) -> None:
    senders = [begin(service) for _ in range(3)]
    live = [row.sequence_id for each in service.open_streams() for row in each.rows]
    clock.now_s += DEAD_DETOKENIZER_S + 1
    service.housekeep()
    # The error itself waits a while for acknowledgements.
    clock.now_s += 2
    service.housekeep()
    let_senders_finish(service)
    for sender in senders:
        assert sender.num_finals == 1
        (error,) = sender.errors
        assert isinstance(error, UnavailableError)
        assert "detokenizer does not answer" in str(error)
    assert sorted(engine.aborted) == sorted(live)
    assert service.open_streams() == []


def test_a_slow_detokenizer_is_waited_for(
    service: LLMService, engine: FakeEngineClient, clock: Clock
) -> None:
    sender = begin(service)
    (row,) = service.open_streams()[0].rows
    clock.now_s += DEAD_DETOKENIZER_S - 1
    service.housekeep()
    service.take_acks([Ack(row.sequence_id, 1, False)])
    clock.now_s += 2
    service.housekeep()
    let_senders_finish(service)
    assert sender.errors == []
    assert engine.aborted == []
