"""Reports of what tenants use: when they are due, and what is in the file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from naiad.engine_process.protocol import UsageReport, encode_frame, engine_message_decoder
from naiad.engine_process.serving import usage_reports
from naiad.engine_process.serving.usage_reports import UsageReports
from naiad.frames import FrameBuffer
from naiad.triton_server.service.lasting_stats import LastingUsage
from naiad.usage import TenantUsage, UsageLine


class Used:
    def __init__(self) -> None:
        self.usages: list[TenantUsage] = []

    def __call__(self) -> list[TenantUsage]:
        return list(self.usages)


@pytest.fixture
def used() -> Used:
    return Used()


def lines_of(path: Path) -> list[UsageLine]:
    return [msgspec.json.decode(line, type=UsageLine) for line in path.read_bytes().splitlines()]


def test_a_report_survives_the_wire() -> None:
    report = UsageReport([TenantUsage("a", 1.5, 2.5, 3, 4, 5, 6)])
    (body,) = FrameBuffer().feed(encode_frame(report))
    assert engine_message_decoder.decode(body) == report


def test_nothing_is_reported_of_an_engine_that_does_nothing(used: Used) -> None:
    reports = UsageReports(used, "m", None)
    assert reports.wait_s() is None
    assert reports.take(has_work=False) is None


def test_reports_are_apart_and_the_last_one_comes_after_the_work(
    used: Used, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(usage_reports.time, "monotonic", lambda: now[0])
    reports = UsageReports(used, "m", None, interval_s=5.0)
    used.usages = [TenantUsage("a", 1.0)]
    assert reports.take(has_work=True) == used.usages
    used.usages = [TenantUsage("a", 2.0)]
    assert reports.take(has_work=True) is None
    now[0] += 2.0
    assert reports.take(has_work=False) is None
    assert reports.wait_s() == pytest.approx(3.0)
    now[0] += 3.0
    assert reports.take(has_work=False) == used.usages
    assert reports.wait_s() is None


def test_the_file_has_what_was_used_since_the_last_line(used: Used, tmp_path: Path) -> None:
    path = tmp_path / "usage"
    reports = UsageReports(used, "m", path, interval_s=0.0)
    used.usages = [TenantUsage("a", 1.0, num_output_tokens=3)]
    reports.take(has_work=True)
    used.usages = [TenantUsage("a", 1.0, num_output_tokens=3), TenantUsage("b", 0.5)]
    reports.take(has_work=True)
    used.usages = [TenantUsage("a", 4.0, num_output_tokens=5), TenantUsage("b", 0.5)]
    reports.flush()
    lines = lines_of(path)
    assert [(line.tenant, line.step_s, line.num_output_tokens) for line in lines] == [
        ("a", 1.0, 3),
        ("b", 0.5, 0),
        ("a", 3.0, 2),
    ]
    assert {line.model for line in lines} == {"m"}
    times = [(line.begin_s, line.end_s) for line in lines]
    assert times[0][1] == times[1][0]
    assert times == sorted(times)


@pytest.mark.parametrize("is_full", [False, True])
def test_what_could_not_be_written_is_in_the_next_line(
    used: Used, tmp_path: Path, is_full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "missing" / "usage"
    if is_full:
        path.parent.mkdir()
        path.symlink_to("/dev/full")
    reports = UsageReports(used, "m", path, interval_s=0.0)
    for step_s in (1.0, 2.0):
        used.usages = [TenantUsage("a", step_s)]
        reports.take(has_work=True)
    assert len(caplog.records) == 1
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    reports.flush()
    assert [line.step_s for line in lines_of(path)] == [2.0]


def test_a_report_of_which_a_part_was_written_is_written_anew(
    used: Used, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "usage", os.write
    reports = UsageReports(used, "m", path, interval_s=0.0)
    used.usages = [TenantUsage("first", 1.0)]
    reports.flush()
    used.usages += [TenantUsage("a", 1.0), TenantUsage("b", 2.0)]
    with monkeypatch.context() as patch:
        # All of the line of a, and a part of b's.
        patch.setattr(os, "write", lambda opened, lines: write(opened, lines[: len(lines) - 20]))
        reports.flush()
    assert [line.tenant for line in lines_of(path)] == ["first"]
    reports.flush()
    assert [line.tenant for line in lines_of(path)] == ["first", "a", "b"]


def test_the_owner_adds_up_the_engines_that_it_lost() -> None:
    lasting = LastingUsage()
    lasting.take([TenantUsage("a", 1.0), TenantUsage("b", num_output_tokens=4)])
    lasting.lose()
    assert lasting.now()[0].step_s == 1.0
    lasting.take([TenantUsage("b", num_output_tokens=2), TenantUsage("c")])
    assert lasting.now() == [
        TenantUsage("a", 1.0),
        TenantUsage("b", num_output_tokens=6),
        TenantUsage("c"),
    ]
    lasting.take([TenantUsage("b", num_output_tokens=3)])
    assert [each.num_output_tokens for each in lasting.now()] == [0, 7]
