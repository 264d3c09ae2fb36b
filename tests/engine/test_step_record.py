"""The engine's statistics of steps, and the timings of sequences."""

from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import BeamParams, SamplingParams


@pytest.fixture
def drive() -> EngineDrive:
    made = EngineDrive(max_num_seqs=1, budget=4)
    made.now = 1.0
    return made


def step_at(drive: EngineDrive, now_s: float) -> None:
    drive.now = now_s
    drive.step()


def rounded(timings: Timings | None) -> list[float]:
    assert timings is not None
    times = timings.arrival_s, timings.first_scheduled_s, timings.first_token_s, timings.last_token_s
    return [round(each, 3) for each in times]


def test_a_sequence_tells_when_what_happened_to_it(drive: EngineDrive) -> None:
    drive.add(1, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=2))
    for now_s in (2.0, 3.0, 5.0):
        step_at(drive, now_s)
    assert rounded(drive.finals[1].timings) == [1.0, 2.0, 3.0, 5.0]


def test_a_search_does_too(drive: EngineDrive) -> None:
    drive = EngineDrive()
    drive.now = 1.0
    drive.add(1, [1, 2, 3], SamplingParams(max_tokens=2), sibling_ids=(2,), beam=BeamParams())
    for now_s in (2.0, 3.0, 5.0):
        step_at(drive, now_s)
    assert rounded(drive.finals[1].timings) == rounded(drive.finals[2].timings) == [1.0, 2.0, 2.0, 3.0]


def test_who_waits_has_not_begun(drive: EngineDrive) -> None:
    drive.add(1, [1])
    drive.add(2, [2])
    step_at(drive, 2.0)
    drive.abort(2)
    assert rounded(drive.finals[2].timings) == [1.0, 0, 0, 0]


def test_a_row_that_fails_has_got_no_token(drive: EngineDrive) -> None:
    drive.add(1, [1])
    drive.runner.failing.add(1)
    step_at(drive, 2.0)
    assert rounded(drive.finals[1].timings) == [1.0, 2.0, 0, 0]


def test_context_tokens_are_those_of_the_last_step(drive: EngineDrive) -> None:
    drive.add(1, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=2))
    seen = []
    for _ in range(3):
        drive.step()
        stats = drive.engine.stats()
        seen.append((stats.num_context_tokens, stats.num_context_seqs, stats.total_steps))
    assert seen == [(4, 1, 1), (2, 0, 2), (0, 0, 3)]


def test_who_was_preempted_and_waits_is_paused() -> None:
    drive = EngineDrive(num_blocks=4, block_size=4, max_num_seqs=2)
    for sequence_id in (1, 2):
        drive.add(sequence_id, [sequence_id] * 7, SamplingParams(max_tokens=8))
    most = 0
    while drive.engine.has_work:
        drive.step()
        most = max(most, drive.engine.stats().num_paused)
    assert most == 1
    assert drive.engine.stats().num_paused == 0


def test_late_compiles_are_told(drive: EngineDrive) -> None:
    assert drive.engine.stats().total_late_compiles == 0
    drive.runner.num_late_compiles = 3
    assert drive.engine.stats().total_late_compiles == 3


def test_the_process_tells_its_memory_and_the_time(drive: EngineDrive) -> None:
    stats = drive.engine.stats()
    assert stats.memory.cpu_bytes == 1
    assert stats.timestamp_s > 1_700_000_000


def test_who_starts_without_a_token_says_so_once() -> None:
    drive = EngineDrive(max_num_seqs=2, budget=4)
    drive.add(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=2))
    drive.add(2, [1, 2, 3, 4], SamplingParams(max_tokens=1))
    drive.add(3, [1, 2, 3], SamplingParams(max_tokens=1))
    assert drive.step() == [RequestOutput(1, [])]
    assert drive.step() == []
    (first, started) = drive.step()
    assert (first.sequence_id, len(first.token_ids)) == (1, 1)
    assert started == RequestOutput(2, [])
    drive.run()
    assert drive.engine.step() == []


def test_a_search_says_by_its_first_id_that_it_has_started() -> None:
    drive = EngineDrive(budget=4)
    drive.add(1, [1, 2, 3], SamplingParams(max_tokens=2), sibling_ids=(2,), beam=BeamParams())
    assert drive.step() == [RequestOutput(1, [])]
    told = []
    while drive.engine.has_work:
        told += [output.sequence_id for output in drive.step() if output.only_started]
    assert told == []
