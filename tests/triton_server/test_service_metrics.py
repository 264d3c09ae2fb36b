from __future__ import annotations

from collections.abc import Iterator

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
from naiad.errors import UnavailableError
from naiad.outputs import EngineStats, RequestOutput, Timings
from naiad.sequence import FinishReason
from naiad.triton_server.service.client_watch import IDLE_ROUND_S, ROUND_S
from naiad.triton_server.service.llm_service import LLMService

NOW_S = 0.01


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def service(engine: FakeEngineClient) -> Iterator[LLMService]:
    made = LLMService(engine, lambda _: None, CountedIds(), LLM_SHAPE)
    yield made
    made.close()


def reasons(service: LLMService) -> list[FinishReason]:
    return [ended.reason for ended in service.observations.take().ended]


def test_what_ended_is_observed_before_the_stats_say_so(service: LLMService) -> None:
    service.accept(llm_source(), FakeSender(), LIMITS)
    seen: list[int] = []
    take = service.observations.take_outputs

    def look(outputs: list[RequestOutput]) -> None:
        seen.append(service.stats.total_generation_tokens)
        take(outputs)

    service.observations.take_outputs = look  # type: ignore[method-assign, assignment]
    last = RequestOutput(1, [10], finish_reason=FinishReason.STOP, timings=Timings())
    service.take_outputs([last], EngineStats(total_generation_tokens=1))
    assert seen == [0]
    assert service.stats.total_generation_tokens == 1
    assert reasons(service) == [FinishReason.STOP]


def test_requests_of_a_lost_engine_end_with_errors_and_its_totals_stay(service: LLMService) -> None:
    service.accept(llm_source(num_return_sequences=2), FakeSender(), LIMITS)
    service.take_outputs([], EngineStats(num_running=2, total_prompt_tokens=6))
    service.engine_lost()
    service.take_outputs([], EngineStats())
    assert reasons(service) == [FinishReason.ERROR] * 2
    assert (service.stats.total_prompt_tokens, service.stats.num_running) == (6, 0)


def test_a_request_that_no_engine_took_has_not_ended(service: LLMService, engine: FakeEngineClient) -> None:
    engine.error = UnavailableError("the engine is restarting")
    service.accept(llm_source(), FakeSender(), LIMITS)
    service.engine_lost()
    assert reasons(service) == []


def test_housekeeping_rests_until_work_begins_or_ends(service: LLMService) -> None:
    assert service.housekeep() == IDLE_ROUND_S
    service.accept(llm_source(), FakeSender(), LIMITS)
    assert service.rest(NOW_S)  # a request has arrived
    assert service.housekeep() == ROUND_S
    service.take_outputs([RequestOutput(1, [10])], EngineStats(num_running=1, total_steps=1))
    assert not service.rest(NOW_S)  # its steps are nothing new
    service.take_outputs([RequestOutput(1, [], finish_reason=FinishReason.STOP)], EngineStats(total_steps=2))
    assert service.rest(NOW_S)
    let_senders_finish(service)
    assert service.housekeep() == IDLE_ROUND_S


@pytest.mark.parametrize("owns_engine", [True, False])
def test_requests_of_other_models_are_work_for_the_owner(engine: FakeEngineClient, owns_engine: bool) -> None:
    service = LLMService(engine, pytest.fail, CountedIds(), LLM_SHAPE, owns_engine=owns_engine)
    service.take_outputs([], EngineStats(num_running=1, total_steps=1))
    assert service.rest(NOW_S)
    assert service.housekeep() == (ROUND_S if owns_engine else IDLE_ROUND_S)
    service.close()


def test_the_loss_of_the_engine_is_shown_at_once(service: LLMService) -> None:
    service.take_outputs([], EngineStats(num_running=1))
    assert service.rest(NOW_S)
    service.engine_lost()
    assert service.rest(NOW_S)
    assert service.housekeep() == IDLE_ROUND_S
