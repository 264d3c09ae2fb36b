from __future__ import annotations

import numpy as np
import pytest

from naiad.speculation.step_cost import StepCost


def test_costs_are_straight_between_measurements_and_never_fall() -> None:
    cost = StepCost([(2, 1.0), (4, 3.0), (8, 2.0)])
    assert cost(np.array([1, 2, 3, 4, 6, 8, 16])).tolist() == [1, 1, 1.5, 2, 2, 2, 4]


@pytest.mark.asserts
@pytest.mark.parametrize("measured", [[(2, 1.0), (1, 2.0)], [(1, 1.0), (1, 2.0)], [(0, 1.0)], [(1, 0.0)]])
def test_measurements_that_can_not_be_are_our_bug(measured: list[tuple[int, float]]) -> None:
    with pytest.raises(AssertionError):
        StepCost(measured)


def test_what_a_context_adds_grows_with_it_and_with_the_window() -> None:
    cost = StepCost([(1, 1.0)], [(1, 2.0), (3, 6.0), (4, 5.0)], num_context=10)
    assert cost.of_context(np.array([1, 2, 3, 4, 9]), np.array(12)).tolist() == [4, 8, 12, 12, 12]
    assert cost.of_context(np.array([[1, 3]]), np.array([[5], [11]])).tolist() == [[0, 0], [2, 6]]
    assert StepCost([(1, 1.0)]).of_context(np.array(3), np.array(999)) == 0
