"""Requests whose grammars are compiled, in a process with a fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from helpers.engine_harness import Recorder, make_request
from helpers.fake_engine_child import SLOW_ID, let_go
from naiad.engine_process import EngineClient
from naiad.sequence import EngineRequest, FinishReason, GrammarKind, GrammarSpec

Served = tuple[EngineClient, Recorder]


def request(sequence_id: int, source: str, first_id: int = 10, **fields: Any) -> EngineRequest:
    made = make_request(sequence_id, first_id)
    params = replace(made.params, grammar=GrammarSpec(kind=GrammarKind.REGEX, source=source))
    return replace(made, params=params, **fields)


def test_a_compiled_request_is_served(served: Served) -> None:
    client, recorder = served
    client.submit([request(1, "good"), request(2, "good")])
    recorder.wait_finished(1, 2)
    assert [recorder.token_ids(each) for each in (1, 2)] == [[10, 11, 12]] * 2
    assert [recorder.num_finishes(each) for each in (1, 2)] == [1, 1]


def test_others_do_not_wait_for_a_grammar(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held"), request(2, "good"), make_request(3, first_id=20)])
    recorder.wait_finished(2, 3)
    assert recorder.reason(1) is None
    let_go(socket_dir)
    recorder.wait_finished(1)
    assert recorder.token_ids(1) == [10, 11, 12]


def test_large_grammars_do_not_keep_small_ones_waiting(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    large = [request(each, "x" * 40_000) for each in range(3, 6)]
    client.submit([request(1, "held"), *large, request(2, "good")])
    recorder.wait_finished(2, *range(3, 6))
    assert recorder.reason(1) is None
    let_go(socket_dir)
    recorder.wait_finished(1)


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("bad", "INVALID_ARG", "grammar: refused"),
        ("bug", "INTERNAL", "the grammar can not be compiled"),
    ],
)
def test_a_refused_grammar_ends_its_request_alone(
    served: Served, source: str, status: str, message: str
) -> None:
    client, recorder = served
    client.submit([request(1, source, sibling_ids=(2,)), make_request(3, first_id=20)])
    recorder.wait_finished(1, 2, 3)
    for each in (1, 2):
        (output,) = recorder.outputs[each]
        assert (output.error_status, output.error_message) == (status, message)
    assert recorder.token_ids(3) == [20, 21, 22]


def test_refused_grammars_take_no_room(served: Served) -> None:
    client, recorder = served
    for start in range(0, 2000, 500):
        client.submit([request(each, "bad") for each in range(start, start + 500)])
        recorder.wait_finished(*range(start, start + 500))
    assert {recorder.outputs[each][0].error_message for each in range(2000)} == {"grammar: refused"}


def test_a_request_is_aborted_while_its_grammar_compiles(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held")])
    client.abort([1])
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.CANCELLED
    let_go(socket_dir)
    client.submit([make_request(2, first_id=20)])
    recorder.wait_finished(2)
    assert recorder.num_finishes(1) == 1
    assert recorder.stats[-1].num_running == 0


def test_a_sibling_is_aborted_while_the_grammar_compiles(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held", sibling_ids=(2, 3))])
    client.abort([2])
    recorder.wait_finished(2)
    let_go(socket_dir)
    recorder.wait_finished(1, 3)
    assert [recorder.num_finishes(each) for each in (1, 2, 3)] == [1, 1, 1]
    assert [recorder.token_ids(each) for each in (1, 3)] == [[10, 11, 12]] * 2
    assert recorder.stats[-1].num_running == 0


def test_a_deadline_passes_while_the_grammar_compiles(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held", timeout_s=0.05, sibling_ids=(2,))])
    recorder.wait_finished(1, 2)
    for each in (1, 2):
        (output,) = recorder.outputs[each]
        assert output.finish_reason is FinishReason.TIMEOUT
        assert output.error_status == "UNAVAILABLE"
        assert output.error_message == "timeout: the request was not started within its time limit"
    let_go(socket_dir)
    client.submit([make_request(3, first_id=20)])
    recorder.wait_finished(3)
    assert [recorder.num_finishes(each) for each in (1, 2)] == [1, 1]


def test_a_deadline_passes_while_others_run(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6), request(2, "held", timeout_s=0.05)])
    recorder.wait_finished(2)
    assert recorder.reason(2) is FinishReason.TIMEOUT


def test_an_id_is_in_use_while_its_grammar_compiles(served: Served) -> None:
    client, recorder = served
    client.submit([request(1, "held")])
    client.submit([request(1, "good")])
    recorder.wait_for(lambda: recorder.num_losses == 1)


def test_a_close_waits_for_a_grammar(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held")])
    let_go(socket_dir)
    client.close(timeout_s=10)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_requests_that_compile_are_counted_as_waiting(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held", sibling_ids=(2, 3)), request(4, "held"), make_request(5, first_id=20)])
    recorder.wait_finished(5)
    counted = recorder.stats[-1]
    num_prompt_tokens = len(make_request(1, first_id=10).prompt_token_ids)
    assert (counted.num_waiting, counted.num_compiling) == (4, 4)
    assert counted.num_waiting_tokens == 4 * num_prompt_tokens
    client.abort([2])
    recorder.wait_finished(2)
    recorder.wait_for(lambda: recorder.stats[-1].num_compiling == 3)
    let_go(socket_dir)
    recorder.wait_finished(1, 3, 4)
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)
    last = recorder.stats[-1]
    assert (last.num_waiting, last.num_waiting_tokens, last.num_compiling) == (0, 0, 0)


def test_requests_that_are_late_or_refused_are_counted_no_longer(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([request(1, "held", timeout_s=0.05), request(2, "bad"), request(3, "held")])
    recorder.wait_finished(1, 2)
    recorder.wait_for(lambda: recorder.stats[-1].num_compiling == 1)
    let_go(socket_dir)
    recorder.wait_finished(3)
    recorder.wait_for(lambda: recorder.stats[-1].num_compiling == 0)


def test_prompts_that_wait_for_a_grammar_count_towards_the_queue(served: Served, socket_dir: Path) -> None:
    """Until their requests end, also in an engine that has nothing to compute."""
    client, recorder = served
    client.submit([request(1, "held", prompt_token_ids=[10] * 990)])
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].num_waiting_tokens == 990)
    small = replace(make_request(2, first_id=20), prompt_token_ids=[20] * 20)
    client.submit([small])
    recorder.wait_finished(2)
    (refused,) = recorder.outputs[2]
    assert refused.error_status == "UNAVAILABLE"
    assert "990 prompt tokens wait and 20 more would come" in refused.error_message
    client.abort([1])
    recorder.wait_finished(1)
    client.submit([replace(small, sequence_id=3)])
    recorder.wait_finished(3)
    assert recorder.token_ids(3) == [20, 21, 22]
    let_go(socket_dir)
