"""Floods of lines, and how lines are written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from naiad.cli import console
from naiad.cli.serve.log_limit import BURST, LogLimit
from naiad.log_lines import LineFormatter, json_line_of, log_line

REFUSAL = 'E1121 06:03:04.281119 13958 infer_request.cc:143] "[request id: r7] the request has no max_tokens"'


class Limited:
    """A limit, what it has written and said, and the end of its period, which the test decides."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.said: list[str] = []
        self.ends: list[Callable[[], None]] = []
        self.limit = LogLimit(self.written.append, self.said.append, lambda _, call: self.ends.append(call))


def test_of_a_flood_the_first_lines_are_written_and_the_others_counted() -> None:
    flood = Limited()
    lines = [f"naiad: a request failed: field 'x{number}' of {number}" for number in range(1000)]
    for line in lines:
        flood.limit.take(line)
    assert flood.written == lines[:BURST]
    (end,) = flood.ends
    end()
    assert flood.said == [f"left out {1000 - BURST} lines of the last 10 s such as: {lines[0]}"]


def test_lines_from_one_place_in_the_server_are_of_one_kind_whatever_a_client_writes_into_them() -> None:
    flood = Limited()
    for words in ("alpha", "beta gamma", "delta", "eps", "zeta", "eta", "theta"):
        flood.limit.take(REFUSAL.replace("max_tokens", words))
    assert len(flood.written) == BURST


def test_lines_of_other_kinds_are_not_held_up_by_a_flood() -> None:
    flood = Limited()
    for _ in range(1000):
        flood.limit.take(REFUSAL)
    flood.limit.take("naiad engine: ERROR: the engine is lost")
    assert flood.written[-1] == "naiad engine: ERROR: the engine is lost"


def test_a_flood_of_ever_new_kinds_is_bounded_too() -> None:
    flood = Limited()
    letters = "abcdefghijklmnopqrstuvwxyz"
    for first in letters:
        for second in letters:
            flood.limit.take(f"{first}{second} is not known")
    assert len(flood.written) == 100
    flood.ends[0]()
    assert flood.said[0].startswith(f"left out {26 * 26 - 100} lines")


def test_a_new_period_begins_with_the_next_line_and_a_quiet_one_says_nothing() -> None:
    flood = Limited()
    for _ in range(3):
        flood.limit.take("x")
        flood.ends[-1]()
    assert flood.written == ["x"] * 3
    assert flood.said == []
    assert len(flood.ends) == 3


def test_a_line_has_time_and_level() -> None:
    assert log_line("text", "naiad", "warning", "no", now_s=1_700_000_000.25) == (
        "2023-11-14T22:13:20.250Z WARNING naiad: no"
    )


def test_a_line_of_the_server_becomes_json_with_its_level_and_request() -> None:
    assert json.loads(json_line_of(REFUSAL, now_s=0.0)) == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "error",
        "source": "tritonserver",
        "message": "[request id: r7] the request has no max_tokens",
        "request_id": "r7",
    }
    ours = json.loads(json_line_of("naiad engine: WARNING: odd", now_s=0.0))
    assert (ours["source"], ours["level"], ours["message"]) == ("naiad engine", "warning", "odd")
    assert json.loads(json_line_of("something\tüber", now_s=0.0))["message"] == "something\tüber"


def test_messages_are_lines_of_a_log_once_a_format_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("first")
    try:
        console.use_log_format("json")
        console.say("second", "warning")
        console.say_error(ValueError("third"))
        console.use_log_format("text")
        console.say_error(ValueError("fourth"))
    finally:
        console.use_log_format(None)
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert first == "naiad: first"
    assert [json.loads(line)["level"] for line in (second, third)] == ["warning", "error"]
    assert json.loads(third)["message"] == "third"
    assert fourth == "naiad: error: fourth"


def test_a_record_with_a_traceback_is_one_line_of_json() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        info = (KeyError, error, error.__traceback__)
    record = logging.LogRecord("n", logging.ERROR, "f.py", 1, "it %s", ("failed",), info)
    line = LineFormatter("json", "naiad openai").format(record)
    assert "\n" not in line
    assert json.loads(line)["message"].startswith("it failed\nTraceback")
