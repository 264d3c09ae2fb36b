from __future__ import annotations

import pytest

from naiad.model_runner import token_budget
from naiad.model_runner.step_costs import measure_step_costs
from naiad.outputs import StepBatch
from naiad.speculation.step_cost import StepCost

BLOCK = 16


class Machine:
    """Computes steps with known durations; for a while something slows it down.

    Another program makes this one wait for a core; a slower core increases CPU time too.
    """

    def __init__(self, slow_from: int, num_slow: int, is_waiting: bool = False) -> None:
        self.now_s = self.computed_s = 0.0
        self.num_runs = 0
        self.tick_s = 0.0
        self._slow = range(slow_from, slow_from + num_slow)
        self._is_waiting = is_waiting

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.computed_s - self.computed_s % self.tick_s if self.tick_s else self.computed_s

    def run(self, step: StepBatch) -> None:
        (row,) = step.rows
        seconds = 0.01 + 0.0005 * row.num_scheduled_tokens + 1e-6 * row.known_end
        seconds += 0.0002 * row.num_scheduled_tokens * (step.admissions[0].params.temperature > 0)
        spent_s = 10 * seconds if self.num_runs in self._slow else seconds
        self.now_s += spent_s
        self.computed_s += seconds if self._is_waiting else spent_s
        self.num_runs += 1


def measured_by(machine: Machine, monkeypatch: pytest.MonkeyPatch, is_cuda: bool = False) -> StepCost:
    monkeypatch.setattr(token_budget, "time", machine)
    return measure_step_costs(machine.run, 4096, BLOCK, is_cuda=is_cuda).step_cost


def test_a_slow_while_at_the_start_changes_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Machine(0, 0)
    expected = vars(measured_by(undisturbed, monkeypatch))
    # The disturbance lasts two rounds over all steps, wherever it begins.
    for slow_from in range(undisturbed.num_runs):
        machine = Machine(slow_from, undisturbed.num_runs // 2)
        found = vars(measured_by(machine, monkeypatch))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-9), (name, slow_from)


def test_what_is_measured_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = measured_by(Machine(0, 0), monkeypatch)
    assert cost.drawn_s == pytest.approx(0.0002)
    short, long = (cost.of_context(1, num_tokens) for num_tokens in (256, 2048))
    assert (short, long) == (0, pytest.approx(1e-6 * (2048 - 256)))


def test_on_a_cpu_waiting_for_a_core_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Machine(0, 1_000_000, is_waiting=True)
    found, expected = (vars(measured_by(each, monkeypatch)) for each in (waiting, Machine(0, 0)))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


def test_a_gpus_time_passes_while_this_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Machine(0, 1_000_000, is_waiting=True)
    assert measured_by(waiting, monkeypatch, is_cuda=True).drawn_s == pytest.approx(0.002)


def test_a_clock_of_coarse_ticks_makes_no_step_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0, 0)
    machine.tick_s = 1e6
    exact = measured_by(Machine(0, 0), monkeypatch)
    assert measured_by(machine, monkeypatch).drawn_s == pytest.approx(exact.drawn_s)


def test_the_token_budget_is_the_same_beside_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []
    for machine in (Machine(0, 0), Machine(0, 1_000_000, is_waiting=True)):
        monkeypatch.setattr(token_budget, "time", machine)
        budgets.append(token_budget.measure_token_budget(machine.run, *token_budget.probe_steps(4096, BLOCK)))
    # 128 tokens take 74.1 ms.
    assert [budget.num_tokens for budget in budgets] == [336, 336]
    assert budgets[1].context_cost == pytest.approx(budgets[0].context_cost)
