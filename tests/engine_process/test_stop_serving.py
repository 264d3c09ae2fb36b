"""The end of service: new requests are refused; running ones finish before the timeout or get an error."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from helpers.engine_harness import RawClient, Recorder, fake_command, make_request, wait_until
from helpers.fake_engine_child import HELD_ID, LONG_ID, REFUSED_ID, SLOW_ID, is_in_long_step, let_go
from naiad.engine_process import EngineClient, StopNotice
from naiad.engine_process.clients import stop_notice
from naiad.engine_process.protocol import Ready, StopServing
from naiad.engine_process.unix_socket import listen
from naiad.sequence import FinishReason, GrammarKind, GrammarSpec

MakeClient = Callable[..., tuple[EngineClient, Recorder]]
Served = tuple[EngineClient, Recorder]
MakeNotice = Callable[[float], StopNotice]


@pytest.fixture
def make_notice(socket_dir: Path) -> Iterator[MakeNotice]:
    notices: list[StopNotice] = []

    def make(timeout_s: float) -> StopNotice:
        notices.append(StopNotice([socket_dir], timeout_s))
        return notices[-1]

    yield make
    for notice in notices:
        notice.close()


def errors(recorder: Recorder, sequence_id: int) -> tuple[int, FinishReason | None, str | None, str]:
    last = recorder.outputs[sequence_id][-1]
    return (
        recorder.num_finishes(sequence_id),
        last.finish_reason,
        last.error_status,
        last.error_message,
    )


def submit_one_that_waits_for_its_grammar(client: EngineClient, recorder: Recorder) -> None:
    """Submit sequence 1; the engine has taken it when sequence 2, which it refuses, has ended."""
    waiting = make_request(1, first_id=10)
    held = GrammarSpec(kind=GrammarKind.REGEX, source="held")
    waiting = replace(waiting, params=replace(waiting.params, grammar=held))
    client.submit([waiting, make_request(2, REFUSED_ID)])
    recorder.wait_finished(2)


def is_refused(client: EngineClient, recorder: Recorder) -> bool:
    """Whether a new request is refused; the notice is sent by another client, so it may arrive later."""
    number = len(recorder.outputs) + 100
    client.submit([make_request(number, first_id=4)])
    recorder.wait_finished(number)
    refused = (1, FinishReason.ERROR, "UNAVAILABLE", "the server is shutting down")
    return errors(recorder, number) == refused


def test_new_requests_are_refused_at_once_and_running_ones_finish(
    served: Served, make_notice: MakeNotice, socket_dir: Path
) -> None:
    client, recorder = served
    client.submit([make_request(1, HELD_ID)])
    recorder.wait_started(1)
    make_notice(600.0).send()
    wait_until(lambda: is_refused(client, recorder))
    assert recorder.reason(1) is None
    let_go(socket_dir)
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_whatever_has_not_finished_in_time_ends_with_one_error(
    served: Served, make_notice: MakeNotice
) -> None:
    client, recorder = served
    client.submit([make_request(i, SLOW_ID, max_tokens=10**6) for i in range(8)])
    recorder.wait_started(7)
    start_s = time.monotonic()
    make_notice(0.5).send()
    recorder.wait_finished(*range(8))
    assert time.monotonic() - start_s > 0.4
    message = "s before the server stopped"
    assert all(message in errors(recorder, i)[3] for i in range(8))
    assert {errors(recorder, i)[:3] for i in range(8)} == {(1, FinishReason.ERROR, "UNAVAILABLE")}
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)
    assert recorder.num_losses == 0


def test_a_request_that_waits_for_its_grammar_is_answered_in_time_too(
    served: Served, make_notice: MakeNotice, socket_dir: Path
) -> None:
    """Nothing else wakes the engine: it has no work, and the request has no deadline."""
    client, recorder = served
    submit_one_that_waits_for_its_grammar(client, recorder)
    make_notice(0.3).send()
    recorder.wait_finished(1)
    message = "the request did not finish in 0.3 s before the server stopped"
    assert errors(recorder, 1) == (1, FinishReason.ERROR, "UNAVAILABLE", message)
    let_go(socket_dir)


def test_any_client_may_tell_and_the_earliest_end_counts(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    other = RawClient(socket_dir / "llm.engine")
    assert isinstance(other.receive(), Ready)
    other.send(StopServing(0.2))
    other.send(StopServing(600.0))
    recorder.wait_finished(1)
    assert errors(recorder, 1)[3] == "the request did not finish in 0.2 s before the server stopped"
    other.close()


def test_an_engine_that_was_restarted_is_notified_again(served: Served, make_notice: MakeNotice) -> None:
    client, recorder = served
    notice = make_notice(600.0)
    notice.send()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: (notice.send(), client.is_ready)[1])
    notice.send()
    wait_until(lambda: is_refused(client, recorder))


def test_no_engine_to_tell_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "dead.engine").touch()
    notice = StopNotice([tmp_path, tmp_path / "nothing"], 1.0)
    notice.send()
    notice.close()


def test_engines_are_done_when_their_last_sequence_has_ended(
    served: Served, make_notice: MakeNotice, socket_dir: Path
) -> None:
    client, recorder = served
    client.submit([make_request(1, HELD_ID)])
    recorder.wait_started(1)
    notice = make_notice(600.0)
    num_messages = len(recorder.outputs[1])
    # It is asked again and again meanwhile, once for each of its steps at most.
    while len(recorder.outputs[1]) < num_messages + 50:
        notice.send()
        assert not notice.is_done()
    let_go(socket_dir)
    wait_until(lambda: (notice.send(), notice.is_done())[1])
    recorder.wait_finished(1)


def test_a_sequence_that_waits_for_its_grammar_has_not_ended(
    served: Served, make_notice: MakeNotice, socket_dir: Path
) -> None:
    client, recorder = served
    submit_one_that_waits_for_its_grammar(client, recorder)
    notice = make_notice(600.0)
    for _ in range(20):
        notice.send()
        assert not notice.is_done()
        time.sleep(0.005)
    let_go(socket_dir)
    wait_until(lambda: (notice.send(), notice.is_done())[1])
    recorder.wait_finished(1)


def test_an_engine_has_work_during_a_step_however_long_it_is(
    served: Served, make_notice: MakeNotice, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, recorder = served
    client.submit([make_request(1, LONG_ID)])
    wait_until(lambda: is_in_long_step(socket_dir))
    notice = make_notice(600.0)
    notice.send()
    (engine,) = notice._notified.values()
    wait_until(lambda: bool(select.select([engine._connection], [], [], 0)[0]))
    notice.send()
    # As if it had said nothing else for so long.
    monkeypatch.setattr(stop_notice, "_READY_S", -math.inf)
    assert not notice.is_done()
    let_go(socket_dir)
    wait_until(lambda: (notice.send(), notice.is_done())[1])
    recorder.wait_finished(1)


def test_an_engine_that_says_nothing_is_not_waited_for(
    make_notice: MakeNotice, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(socket_dir / "llm.engine"):
        notice = make_notice(600.0)
        notice.send()
        monkeypatch.setattr(stop_notice, "_READY_S", math.inf)
        assert not notice.is_done()
        monkeypatch.setattr(stop_notice, "_READY_S", -math.inf)
        assert notice.is_done()


def test_an_engine_that_is_loading_is_not_waited_for(
    make_notice: MakeNotice, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_notice, "_READY_S", math.inf)
    command = [*fake_command("never-ready"), "--socket", str(socket_dir / "llm.engine")]
    command += ["--parent-pid", str(os.getpid()), "--model-dir", str(socket_dir)]
    engine = subprocess.Popen(command)
    try:
        wait_until((socket_dir / "llm.engine").exists)
        notice = make_notice(600.0)
        wait_until(lambda: (notice.send(), notice.is_done() and bool(notice._notified))[1])
    finally:
        engine.kill()
        engine.wait()
