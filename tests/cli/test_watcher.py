from __future__ import annotations

import errno
import itertools
import threading

import pytest

from helpers.server import eventually
from naiad.cli.serve import watcher as watching
from naiad.cli.serve.probes import ProbeFailure
from naiad.cli.serve.watcher import Verdict, Watcher

ERROR = ProbeFailure("llm: not healthy", is_silence=False)
SILENCE = ProbeFailure("llm: no answer", is_silence=True)


def test_one_error_is_not_enough() -> None:
    verdict = Verdict(3)
    verdict.take(ERROR, 3)
    verdict.take(None, 3)
    verdict.take(ERROR, 3)
    assert verdict.reason is None


def test_two_errors_in_a_row_are() -> None:
    verdict = Verdict(3)
    verdict.take(ERROR, 3)
    verdict.take(ERROR, 3)
    assert verdict.reason == "llm: not healthy"


def test_silence_while_all_stubs_live_is_a_busy_machine() -> None:
    verdict = Verdict(3)
    for _ in range(16):
        verdict.take(SILENCE, 3)
    assert verdict.reason is None


def test_silence_with_a_stub_gone_is_death() -> None:
    verdict = Verdict(3)
    verdict.take(SILENCE, 2)
    assert verdict.reason == "llm: no answer; its process is gone"


def test_seventeen_silences_in_a_row_are_death() -> None:
    verdict = Verdict(3)
    for _ in range(17):
        assert verdict.reason is None
        verdict.take(SILENCE, 3)
    assert verdict.reason == "llm: no answer, 17 times in a row"


def test_an_answer_starts_the_count_again() -> None:
    verdict = Verdict(3)
    for _ in range(2):
        verdict.take(None, 3)
        for _ in range(16):
            verdict.take(SILENCE, 3)
    assert verdict.reason is None


def test_the_watcher_reports_a_dead_server() -> None:
    watcher = Watcher(lambda: ERROR, lambda: 3)
    eventually(lambda: watcher.reason == "llm: not healthy")


def test_an_outcome_after_stop_does_not_count() -> None:
    probing, go_on = threading.Event(), threading.Event()

    def probe() -> ProbeFailure:
        probing.set()
        assert go_on.wait(10)
        return SILENCE

    num_stubs = [3]
    watcher = Watcher(probe, lambda: num_stubs[0])
    assert probing.wait(10)
    num_stubs[0] = 0
    watcher.stop()
    go_on.set()
    watcher.join(10)
    assert watcher.reason is None


NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PERIOD_S", 0.01)
    monkeypatch.setattr(watching, "_RETRY_S", 0.01)


@pytest.mark.usefixtures("is_fast")
def test_a_lack_of_descriptors_is_told_once_and_the_watch_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = itertools.count()

    def count_stubs() -> int:
        number = next(rounds)
        if 0 < number < 5:
            raise NO_DESCRIPTOR
        return 3 if number == 0 else 2

    watcher = Watcher(lambda: SILENCE, count_stubs)
    eventually(lambda: watcher.reason == "llm: no answer; its process is gone")
    assert capsys.readouterr().err.count("Too many open files") == 1


@pytest.mark.usefixtures("is_fast")
def test_without_a_descriptor_for_anything_errors_still_count() -> None:
    def count_stubs() -> int:
        raise NO_DESCRIPTOR

    watcher = Watcher(lambda: ERROR, count_stubs)
    eventually(lambda: watcher.reason == "llm: not healthy")


@pytest.mark.usefixtures("is_fast")
def test_a_probe_for_which_there_is_no_descriptor_is_sent_again() -> None:
    outcomes = iter([NO_DESCRIPTOR, NO_DESCRIPTOR])

    def probe() -> ProbeFailure:
        if (error := next(outcomes, None)) is not None:
            raise error
        return ERROR

    watcher = Watcher(probe, lambda: 3)
    eventually(lambda: watcher.reason == "llm: not healthy")
