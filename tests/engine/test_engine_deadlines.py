from __future__ import annotations

from helpers.engine_drive import EngineDrive
from naiad.engine.deadlines import Deadlines
from naiad.sequence import BeamParams, FinishReason, SamplingParams

YEAR_S = 365 * 24 * 3600.0


def test_the_live_come_in_order_once_their_time_has_passed() -> None:
    deadlines = Deadlines(lambda each: each != 3)
    for deadline_s, sequence_id in ((5.0, 1), (1.0, 2), (2.0, 3), (4.0, 4)):
        deadlines.add(deadline_s, sequence_id)
    assert list(deadlines.pop_passed(4.0)) == [2, 4]
    assert list(deadlines.pop_passed(9.0)) == [1]


def test_those_that_have_ended_are_forgotten_once_they_are_more_than_half() -> None:
    live = set(range(10))
    deadlines = Deadlines(live.__contains__)
    for sequence_id in range(10):
        deadlines.add(10.0 - sequence_id, sequence_id)
    live -= set(range(5))
    deadlines.forget_ended(len(live))
    assert len(deadlines) == 10
    live.remove(7)
    deadlines.forget_ended(len(live))
    assert list(deadlines.pop_passed(10.0)) == [9, 8, 6, 5]


def test_an_engine_remembers_no_deadlines_of_the_past() -> None:
    drive = EngineDrive()
    drive.add(1, [1], SamplingParams(max_tokens=200), timeout_s=5.0)
    for number in range(100):
        beam = BeamParams() if number % 2 else None
        ids = (10 * number + 11, 10 * number + 12)
        params = SamplingParams(max_tokens=1)
        drive.add(ids[0], [2], params, timeout_s=YEAR_S, sibling_ids=ids[1:], beam=beam)
    while len(drive.finals) < 200:
        drive.step()
    assert len(drive.engine._deadlines) <= 2
    drive.now += 5.0
    drive.step()
    assert drive.reason(1) is FinishReason.TIMEOUT
