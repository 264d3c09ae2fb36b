"""When a start has failed although the server runs on."""

from __future__ import annotations

from naiad.cli.serve.start_watch import DEAD_STUB_S, StartSight, StartWatch


def test_a_stub_that_ended_unnoticed_is_told_after_a_while_and_not_at_once() -> None:
    watch = StartWatch(600, 0.0)
    dead = StartSight(dead_stubs={7: " by signal SIGKILL"})
    assert watch.take(dead, 1.0) is None
    assert watch.take(dead, DEAD_STUB_S) is None
    assert watch.take(dead, 1.0 + DEAD_STUB_S) == (
        "the process of a model (the Python backend's stub) ended by signal SIGKILL, "
        "and the server still waits for it"
    )
    assert DEAD_STUB_S < 18


def test_a_stub_that_was_alive_and_is_gone_is_told() -> None:
    watch = StartWatch(600, 0.0)
    assert watch.take(StartSight(stubs={7: "text", 8: "llm"}), 1.0) is None
    gone = StartSight(stubs={8: "llm"})
    assert watch.take(gone, 2.0) is None
    said = watch.take(gone, 2.0 + DEAD_STUB_S) or ""
    assert said.startswith("the process of model text (the Python backend's stub) ended, and")


def test_a_start_in_which_nothing_happens_ends_after_the_timeout() -> None:
    watch = StartWatch(60, 0.0)
    idle = StartSight(stubs={7: "llm"}, num_lines=3, cpu_s=2.0)
    assert [watch.take(idle, float(second)) for second in range(1, 61)] == [None] * 60
    assert watch.take(idle, 75.0) == (
        "it made no progress for 60 s: no output, no new process, no computing, no reading; "
        "--start-timeout-s sets this time"
    )


def test_computing_reading_and_printing_are_progress() -> None:
    for field, amount in (("cpu_s", 0.1), ("read_bytes", 1 << 20), ("num_lines", 1)):
        watch = StartWatch(60, 0.0)
        for second in range(1, 400):
            sight = StartSight(**{field: type(amount)(amount * second)})
            assert watch.take(sight, float(second)) is None, field


def test_the_little_that_idle_processes_compute_is_no_progress() -> None:
    watch = StartWatch(60, 0.0)
    reasons = [watch.take(StartSight(cpu_s=0.02 * second), float(second)) for second in range(1, 100)]
    assert any(reasons)
