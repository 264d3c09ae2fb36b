from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from helpers.engine_harness import WAIT_S, RawClient, Recorder, has_ended, make_request, wait_until
from helpers.fake_engine_child import LAST_ID, REFUSED_ID, SLOW_ID, STUCK_ID, let_go
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.engine_process.protocol import StopRequests
from naiad.errors import InternalError, StartupError, UnavailableError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason, GrammarKind, GrammarSpec
from naiad.usage import TenantUsage

MakeClient = Callable[..., tuple[EngineClient, Recorder]]
Served = tuple[EngineClient, Recorder]


def test_start_tells_what_the_engine_is(served: Served) -> None:
    info = served[0].info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids, info.max_num_seqs) == (
        64,
        1000,
        [2, 3],
        8,
    )


def test_tokens_come_back_in_order(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(5, first_id=10, max_tokens=4)])
    recorder.wait_finished(5)
    assert recorder.token_ids(5) == [10, 11, 12, 13]
    assert recorder.reason(5) is FinishReason.LENGTH


def test_each_of_many_sequences_finishes_once(served: Served) -> None:
    client, recorder = served
    for start in range(0, 200, 20):
        client.submit([make_request(i, first_id=i, max_tokens=1 + i % 7) for i in range(start, start + 20)])
    recorder.wait_finished(*range(200))
    assert [recorder.token_ids(i) for i in range(200)] == [list(range(i, i + 1 + i % 7)) for i in range(200)]
    assert {recorder.num_finishes(i) for i in range(200)} == {1}


def test_one_step_is_one_message(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(i, first_id=i, max_tokens=2) for i in range(8)])
    recorder.wait_finished(*range(8))
    assert [stats.total_steps for stats in recorder.stats] == [1, 2]


def test_aborted_sequence_ends_cancelled_and_leaves_the_engine(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    recorder.wait_started(1)
    client.abort([1])
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)
    assert recorder.reason(1) is FinishReason.CANCELLED
    assert recorder.num_finishes(1) == 1


def test_aborted_sequence_gets_what_the_engine_held_back(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    client.abort([1])
    recorder.wait_finished(1)
    assert recorder.token_ids(1)[-1] == LAST_ID


def test_each_sibling_can_be_aborted(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6, sibling_ids=(2, 3))])
    recorder.wait_started(3)
    client.abort([3])
    recorder.wait_finished(3)
    assert recorder.num_finishes(1) == recorder.num_finishes(2) == 0
    client.abort([1, 2])
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)
    assert [recorder.num_finishes(i) for i in (1, 2, 3)] == [1, 1, 1]


def test_siblings_finish_before_a_close(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=20, sibling_ids=(2,))])
    client.close(timeout_s=10)
    assert [recorder.reason(i) for i in (1, 2)] == [FinishReason.LENGTH] * 2


def test_abort_of_unknown_sequence_disturbs_nobody(served: Served) -> None:
    client, recorder = served
    client.abort([77])
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert set(recorder.outputs) == {1}


def test_refused_request_is_answered_and_its_neighbour_served(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, REFUSED_ID), make_request(2, first_id=4)])
    recorder.wait_finished(1, 2)
    (refusal,) = recorder.outputs[1]
    assert (refusal.error_status, refusal.error_message) == ("INVALID_ARG", "prompt: refused")
    assert recorder.token_ids(2) == [4, 5, 6]


def test_refused_requests_take_no_room(served: Served) -> None:
    client, recorder = served
    for start in range(0, 3000, 500):
        client.submit([make_request(i, REFUSED_ID) for i in range(start, start + 500)])
        recorder.wait_finished(*range(start, start + 500))
    assert {recorder.outputs[i][0].error_status for i in range(3000)} == {"INVALID_ARG"}


def test_request_that_can_not_be_encoded_leaves_nothing_behind(make_client: MakeClient) -> None:
    client, recorder = make_client(watchdog_s=3.0)
    client.start()
    with pytest.raises(InternalError, match="can not be sent to the engine"):
        client.submit([make_request(1, first_id=4), make_request(2, first_id=2**64)])
    time.sleep(3.5)
    client.submit([make_request(3, first_id=4)])
    recorder.wait_finished(3)
    assert recorder.num_losses == 0
    assert set(recorder.outputs) == {3}


def test_outputs_that_can_not_be_taken_end_their_sequences_alone(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client, recorder = make_client()
    take = recorder.on_outputs

    def take_or_fail(outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        if any(output.sequence_id == 1 and output.token_ids == [SLOW_ID] for output in outputs):
            raise KeyError("a secret detail")
        take(outputs, stats)

    client._on_outputs = take_or_fail
    client.start()
    client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    recorder.wait_finished(1)
    assert recorder.outputs[1][0].error_status == "INTERNAL"
    # It was accepted, so it counts.
    assert recorder.outputs[1][0].timings is not None
    # It is aborted in the engine, too.
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].num_running == 0)
    client.submit([make_request(2, first_id=4)])
    recorder.wait_finished(2)
    assert recorder.token_ids(2) == [4, 5, 6]
    assert recorder.num_losses == 0
    (said,) = caplog.messages
    assert said.startswith("what the engine has sent could not be taken: KeyError at engine_process/test_")


def test_what_another_client_sends_during_the_start_does_not_fail_it(
    make_client: MakeClient, socket_dir: Path
) -> None:
    client, _ = make_client("starts-when-let-go")
    stopped: list[str] = []
    client.on_stop = stopped.append
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(client.start)
        # The engine takes the first connection from its parent for its owner's.
        wait_until(lambda: client._child is not None and client._child._connection is not None)
        child = client._child
        assert child is not None
        other = RawClient(socket_dir / "llm.engine")
        other.send(StopRequests("seven"))
        wait_until(lambda: bool(child._early) or start.done())
        let_go(socket_dir)
        start.result(WAIT_S)
    wait_until(lambda: stopped == ["seven"])
    other.close()


def test_waiting_for_a_grammar_is_no_silence(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    reports: list[list[TenantUsage]] = []
    client.on_usage = reports.append
    made = make_request(1, first_id=4)
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="held")
    client.submit([replace(made, params=replace(made.params, grammar=spec))])
    wait_until(lambda: bool(reports))
    assert recorder.reason(1) is None
    let_go(socket_dir)
    recorder.wait_finished(1)


def test_idle_engine_is_silent(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    num_messages = len(recorder.stats)
    time.sleep(0.2)
    assert len(recorder.stats) == num_messages


def test_engine_that_can_not_start_says_why(make_client: MakeClient, socket_dir: Path) -> None:
    client, _ = make_client("no-model")
    with pytest.raises(StartupError, match=rf"^{socket_dir} has no weights$"):
        client.start()
    assert not client.is_ready


def test_bug_while_starting_keeps_its_details(make_client: MakeClient) -> None:
    client, _ = make_client("bug")
    with pytest.raises(StartupError, match=r"^internal error while starting: KeyError$"):
        client.start()


def test_process_that_dies_while_starting_is_an_error(make_client: MakeClient) -> None:
    client, _ = make_client("dies")
    with pytest.raises(StartupError, match=r"ended while starting \(exit code 7\)"):
        client.start()


def test_start_that_takes_too_long_is_an_error_and_leaves_no_process(
    make_client: MakeClient, socket_dir: Path
) -> None:
    client, _ = make_client("never-ready", start_timeout_s=0.5)
    with pytest.raises(StartupError, match="not become ready in time"):
        client.start()
    assert client.pid is None
    assert not (socket_dir / "llm.engine").exists()


def test_command_that_does_not_exist_is_an_error(socket_dir: Path) -> None:
    recorder = Recorder()
    client = EngineClient(
        EngineConfig(model_dir="m"),
        socket_dir / "engine.sock",
        recorder.on_outputs,
        recorder.on_lost,
        command=[str(socket_dir / "no-such-program")],
    )
    with pytest.raises(StartupError, match="can not be run: No such file"):
        client.start()


def test_too_long_socket_path_is_an_error(socket_dir: Path) -> None:
    recorder = Recorder()
    path = socket_dir / ("x" * 120)
    client = EngineClient(EngineConfig(model_dir="m"), path, recorder.on_outputs, recorder.on_lost)
    with pytest.raises(StartupError, match="too long for a Unix socket"):
        client.start()


def test_close_finishes_what_runs(served: Served) -> None:
    client, recorder = served
    client.submit([make_request(1, SLOW_ID, max_tokens=50)])
    recorder.wait_started(1)
    client.close(timeout_s=20)
    assert len(recorder.token_ids(1)) == 50
    assert recorder.num_losses == 0


def test_close_leaves_no_process_and_no_socket(served: Served, socket_dir: Path) -> None:
    client, _ = served
    pid = client.pid
    assert pid is not None
    client.close(timeout_s=20)
    wait_until(lambda: has_ended(pid))
    assert list(socket_dir.iterdir()) == []


def test_close_ends_a_stuck_engine_and_reports_the_loss(served: Served) -> None:
    client, recorder = served
    pid = client.pid
    assert pid is not None
    client.submit([make_request(1, STUCK_ID)])
    client.close(timeout_s=0.2)
    assert has_ended(pid)
    assert recorder.num_losses == 1


def test_closed_client_refuses(served: Served) -> None:
    client, _ = served
    client.close(timeout_s=20)
    with pytest.raises(UnavailableError, match="shutting down"):
        client.submit([make_request(1, first_id=4)])
