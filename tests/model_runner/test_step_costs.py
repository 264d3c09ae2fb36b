from __future__ import annotations

import pytest

from naiad.model_runner import token_budget
from naiad.model_runner.step_costs import measure_step_costs
from naiad.outputs import SchedulerOutput
from naiad.speculation.step_cost import StepCost

BLOCK = 16


class Machine:
    """Computes steps in known times, but for a while another program slows it down."""

    def __init__(self, slow_from: int, num_slow: int) -> None:
        self.now_s = 0.0
        self.num_runs = 0
        self._slow = range(slow_from, slow_from + num_slow)

    def perf_counter(self) -> float:
        return self.now_s

    def run(self, step: SchedulerOutput) -> None:
        (row,) = step.scheduled
        seconds = 0.01 + 0.0005 * row.num_scheduled_tokens + 1e-6 * row.sequence.num_tokens
        seconds += 0.0002 * row.num_scheduled_tokens * (row.sequence.params.temperature > 0)
        self.now_s += 10 * seconds if self.num_runs in self._slow else seconds
        self.num_runs += 1


def measured_by(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> StepCost:
    monkeypatch.setattr(token_budget, "time", machine)
    return StepCost(*measure_step_costs(machine.run, 4096, BLOCK, is_cuda=False))


def test_a_slow_while_at_the_start_changes_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = Machine(0, 0)
    expected = vars(measured_by(undisturbed, monkeypatch))
    # As long as two rounds over all steps, wherever it begins.
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
