"""A soak sees what is wrong and what grows."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from perf.common import report
from perf.server.processor_time import GATE, OPENAI
from perf.server.soak import run
from perf.server.soak.__main__ import main
from perf.server.soak.judge import DISTURBANCES, RELOAD, STUB, Disturbance, Judge, Trial
from perf.server.soak.memory import (
    ENGINE,
    Lives,
    Sample,
    kept_descriptors,
    kept_shared_mb,
    minutes_of,
    slope_of,
    total_slope,
)
from perf.server.soak.pieces import Piece, read_piece
from perf.server.soak.questions import NO_END, Door, Heard, Question, bounded, draw_questions
from perf.server.soak.run import Soak

from naiad.errors import ConfigError

TEXT, STREAM, CHAT = (Question(0, door, {"stream": True}) for door in (Door.TEXT, Door.ENSEMBLE, Door.CHAT))
WHOLE = ["a whole answer"]


def trial(question: Question, pieces: list[str], *, error: str = "", **heard: bool) -> Trial:
    said = Heard(num_ends=1, error=error, **heard)
    for piece in pieces:
        said.take(0, piece)
    return Trial(question, said, began_s=10.0, ended_s=12.0)


def judged(one: Trial, *disturbances: Disturbance) -> Judge:
    judge = Judge(disturbances, expected=[WHOLE])
    judge.take(one)
    return judge


def test_a_whole_answer_must_be_the_expected_one() -> None:
    assert judged(trial(TEXT, ["a whole", " answer"])).num == {"requests": 1, "whole": 1}
    for pieces in (["a whole"], ["a whole answer."], ["another"], []):
        judge = judged(trial(TEXT, pieces))
        assert judge.num["wrong"] == 1
        assert len(judge.faults) == 1


def test_whoever_leaves_has_the_beginning() -> None:
    assert judged(trial(STREAM, ["a whole"], has_left=True)).num["left"] == 1
    assert judged(trial(STREAM, ["an answer"], has_left=True)).num["wrong"] == 1


@pytest.mark.parametrize("num_ends", [0, 2])
def test_an_answer_ends_once(num_ends: int) -> None:
    one = trial(STREAM, WHOLE)
    one.heard.num_ends = num_ends
    judge = judged(one)
    assert judge.num["ends lost"] == 1
    assert f"{num_ends} ends" in judge.faults[0]


@pytest.mark.parametrize(
    ("kind", "question", "error", "is_excused"),
    [
        (ENGINE, STREAM, "the engine has stopped", True),
        (ENGINE, STREAM, "the call broke: UNAVAILABLE", False),
        (OPENAI, CHAT, "the connection broke", True),
        (OPENAI, STREAM, "the call broke", False),
        (GATE, STREAM, "the call broke", True),
        (GATE, CHAT, "the connection broke", False),
        (STUB, CHAT, "the connection broke", True),
        (RELOAD, STREAM, "the model is not ready", False),
    ],
)
def test_a_disturbance_excuses_what_it_cuts_off(
    kind: str, question: Question, error: str, is_excused: bool
) -> None:
    one = trial(question, ["a whole"], error=error)
    judge = judged(one, Disturbance(kind, 11.0, 20.0))
    assert judge.num["cut off" if is_excused else "failed"] == 1
    assert len(judge.faults) == (0 if is_excused else 1)
    for another_time in (Disturbance(kind, 1.0, 9.0), Disturbance(kind, 13.0, 20.0)):
        assert judged(one, another_time).num["failed"] == 1


@pytest.mark.parametrize("kind", DISTURBANCES)
@pytest.mark.parametrize("question", [TEXT, STREAM, CHAT])
@pytest.mark.parametrize("has_deadline", [False, True])
def test_nothing_excuses_a_request_that_never_ends(kind: str, question: Question, has_deadline: bool) -> None:
    heard = asyncio.run(bounded(asyncio.sleep(60, Heard()), 0.0))
    judge = judged(Trial(question, heard, 10.0, 12.0, has_deadline), Disturbance(kind, 11.0, 20.0))
    assert judge.num == {"requests": 1, "ends lost": 1}
    assert "no end after 0 s" in judge.faults[0]


@pytest.mark.parametrize("error", ["the engine has stopped", "503: timeout in the queue"])
def test_nothing_excuses_a_second_end(error: str) -> None:
    heard = Heard(num_ends=2, error=error)
    judge = judged(Trial(STREAM, heard, 10.0, 12.0, has_deadline=True), Disturbance(ENGINE, 11.0, 20.0))
    assert judge.num == {"requests": 1, "ends lost": 1}
    assert "2 ends" in judge.faults[0]


def test_a_request_that_is_lost_while_a_server_recovers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Heard(error=f"{NO_END} 120 s"), *[Heard(num_ends=1)] * len(Door)])

    async def hear(*_: object) -> Heard:
        return next(answers)

    monkeypatch.setattr(run, "bounded", hear)
    monkeypatch.setattr(run, "resolve_model", lambda _: None)
    monkeypatch.setattr(run.ModelConfig, "from_directory", lambda _: SimpleNamespace(vocab_size=2000))
    server: Any = None
    soak = Soak(server, Path(), "", argparse.Namespace(seed=1, model="", questions=len(Door)))
    soak._asker = Mock()
    asyncio.run(soak._until_well(ENGINE))
    assert next(answers, None) is None
    assert len(soak.judge.faults) == 1
    assert "no end after" in soak.judge.faults[0]


def test_no_disturbance_excuses_a_wrong_token() -> None:
    one = trial(STREAM, ["another"], error="the engine has stopped")
    assert judged(one, Disturbance(ENGINE, 11.0, 20.0)).num["wrong"] == 1


def test_a_deadline_may_pass() -> None:
    late = Trial(STREAM, trial(STREAM, ["a whole"]).heard, 10.0, 12.0, has_deadline=True)
    assert judged(late).num["late"] == 1
    refused = trial(STREAM, [], error="503: timeout in the queue").heard
    assert judged(Trial(STREAM, refused, 10.0, 12.0, has_deadline=True)).num["late"] == 1


def life(draw: random.Random, mb_per_h: float, num_minutes: int, level: float) -> list[tuple[float, float]]:
    return [(i / 60, level + mb_per_h * i / 60 + draw.gauss(0, 0.2)) for i in range(num_minutes)]


@pytest.mark.parametrize("mb_per_h", [0.0, 3.0])
def test_a_slope_is_found_over_lives_of_any_level(mb_per_h: float) -> None:
    draw = random.Random(7)
    lives: Lives = [life(draw, mb_per_h, 30, level) for level in (100.0, 900.0, 20.0)]
    slope = slope_of(lives)
    assert abs(slope.mb_per_h - mb_per_h) < 4 * slope.error < 1.0
    assert slope.lower < slope.mb_per_h < slope.upper
    assert slope.hours == pytest.approx(3 * 29 / 60)


def test_errors_of_bounds_are_right_where_neighbours_are_alike() -> None:
    draw, num_above = random.Random(11), 0
    for _ in range(200):
        level, points = 0.0, []
        for minute in range(60):
            level = 0.7 * level + draw.gauss(0, 0.2)
            points.append((minute / 60, level))
        num_above += slope_of([points]).lower > 0.0
    # 5 % of 200 are 10. Without the correction it is about a quarter of them.
    assert num_above <= 26


def test_the_first_minutes_of_each_life_do_not_count() -> None:
    samples = [
        Sample(10.0 * i, ENGINE, f"life {born}", 100.0 if 10 * i - born >= 300 else 10.0, 5)
        for born in (0, 1200)
        for i in range(born // 10, born // 10 + 90)
    ]
    short = [Sample(10.0 * i, "text", "short", 1.0, 5) for i in range(40)]
    minutes = minutes_of([*samples, *short], warm_up_s=300)
    assert set(minutes) == {ENGINE}
    assert [len(points) for points in minutes[ENGINE]] == [10, 10]
    assert {value for points in minutes[ENGINE] for _, value in points} == {100.0}


@pytest.mark.parametrize(
    ("a_minute", "expected"),
    [(0.0, []), (1.0, ["a process of 'engine' holds 53 descriptors more than when it was warm"])],
)
def test_descriptors_that_are_kept_are_told(a_minute: float, expected: list[str]) -> None:
    # What is open in between may be many; the first minutes do not count.
    samples = [
        Sample(10.0 * i, ENGINE, "life", 1.0, round(a_minute * i / 6) + (500 if i < 30 or i == 200 else 20))
        for i in range(360)
    ]
    assert kept_descriptors(samples, warm_up_s=300) == expected


def test_shared_memory_that_is_kept_is_told() -> None:
    level = [(i / 360, 40.0 if i == 100 else 5.0) for i in range(360)]
    assert kept_shared_mb(level, warm_up_s=300) == []
    step = [(at_h, mb + (9.0 if at_h > 0.5 else 0.0)) for at_h, mb in level]
    assert kept_shared_mb(step, warm_up_s=300) == ["/dev/shm holds 9.0 MB more than after warming up"]


def test_all_roles_together_grow_as_their_sum() -> None:
    draw = random.Random(3)
    slopes = {name: slope_of([life(draw, 1.0, 60, 50.0)]) for name in ("a", "b")}
    total = total_slope(slopes)
    assert total.mb_per_h == pytest.approx(sum(each.mb_per_h for each in slopes.values()))
    assert max(each.error for each in slopes.values()) < total.error < sum(s.error for s in slopes.values())


def test_pieces_are_read_back_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    piece = Piece(1.5, Counter(requests=7, whole=6), 1, disturbances=Counter({ENGINE: 2}))
    piece.minutes[ENGINE].append([(0.1, 100.25), (0.2, 101.0)])
    path = tmp_path / report.write_report("soak", {}, list(piece.rows()))
    again = read_piece(path)
    assert again == piece
    again.add(piece)
    assert (again.hours, again.num["requests"], again.num_faults) == (3.0, 14, 2)
    assert again.minutes[ENGINE] == piece.minutes[ENGINE] * 2
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json': expected a report of perf\.server\.soak"):
        read_piece(tmp_path / "other.json")


def test_questions_are_always_the_same_and_come_by_every_door() -> None:
    questions = draw_questions(60, vocab_size=49152)
    assert questions == draw_questions(60, vocab_size=49152)
    assert {each.door for each in questions} == set(Door)
    assert [each.number for each in questions] == list(range(60))


def test_a_sequence_of_which_nothing_came_has_an_empty_answer() -> None:
    heard = Heard()
    heard.take(0, [])
    heard.take(1, [5, 6])
    heard.take(2, "")
    heard.take(3, "text")
    assert heard.answer == [[], [5, 6], "", "text"]


@pytest.mark.parametrize(("mb_per_h", "code", "told"), [(0.0, 0, "below"), (30.0, 1, "surely above")])
def test_earlier_reports_are_judged_together(
    mb_per_h: float,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    piece = Piece(1.5, Counter(requests=7))
    piece.minutes[ENGINE].append(life(random.Random(5), mb_per_h, 60, 100.0))
    path = str(tmp_path / report.write_report("soak", {}, list(piece.rows())))
    assert main(["--only-earlier", "--earlier", path, path]) == code
    assert f"{told} the limit" in capsys.readouterr().out


def test_memory_that_was_not_observed_is_not_below_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    path = str(tmp_path / report.write_report("soak", {}, list(Piece(0.1, Counter(requests=7)).rows())))
    assert main(["--only-earlier", "--earlier", path]) == 1
    told = capsys.readouterr().out
    assert "memory was not observed" in told
    assert "below" not in told
