from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.triton_server_doubles import LIMITS, CountedIds, FakeDoor, FakeSender, llm_source
from naiad.errors import UnavailableError
from naiad.outputs import EngineStats, RequestOutput, Timings
from naiad.sequence import FinishReason
from naiad.triton_server.llm_service import LLMService


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor()


@pytest.fixture
def service(door: FakeDoor) -> Iterator[LLMService]:
    made = LLMService(door, lambda _: None, CountedIds())
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


def test_a_request_that_no_engine_took_has_not_ended(service: LLMService, door: FakeDoor) -> None:
    door.error = UnavailableError("the engine is restarting")
    service.accept(llm_source(), FakeSender(), LIMITS)
    service.engine_lost()
    assert reasons(service) == []
