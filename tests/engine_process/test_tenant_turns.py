from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from concurrent.futures.thread import BrokenThreadPool

import pytest

from naiad.engine_process.serving.tenant_turns import TenantTurns


def test_a_tenant_with_many_jobs_waits_for_one_with_few() -> None:
    turns = TenantTurns[str](1, "turns", lambda: None)
    begun, may_go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def job(name: str) -> str:
        if name == "a0":
            begun.set()
            assert may_go_on.wait(60)
        done.append(name)
        return name

    futures = [turns.submit("a", lambda: job("a0"))]
    assert begun.wait(60)
    for name in ("a1", "a2", "a3", "b0", "b1", "c0"):
        futures.append(turns.submit(name[0], lambda name=name: job(name)))
    may_go_on.set()
    assert [future.result(60) for future in futures] == ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
    assert done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_a_job_that_raises_is_no_others_matter() -> None:
    turns = TenantTurns[int](1, "turns", lambda: None)
    failing, other = turns.submit("a", lambda: 1 // 0), turns.submit("a", lambda: 2)
    assert other.result(60) == 2
    with pytest.raises(ZeroDivisionError):
        failing.result(60)


def test_a_future_that_is_cancelled_before_its_turn_costs_no_thread() -> None:
    turns, may_end = TenantTurns[str](1, "turns", lambda: None), threading.Event()
    first = turns.submit("a", lambda: str(may_end.wait(30)))
    second, third = turns.submit("a", lambda: "second"), turns.submit("a", lambda: "third")
    assert second.cancel()
    may_end.set()
    assert (first.result(30), third.result(30)) == ("True", "third")
    with pytest.raises(CancelledError):
        second.result(30)


def test_jobs_of_a_pool_that_has_broken_end_with_its_error() -> None:
    def fail() -> None:
        raise OSError("no thread can begin")

    turns = TenantTurns[str](1, "turns", fail)
    for _ in range(3):
        with pytest.raises(BrokenThreadPool):
            turns.submit("a", lambda: "done").result(30)
