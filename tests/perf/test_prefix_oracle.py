from __future__ import annotations

import pytest
from perf.server.prefix_oracle import area_under_curve, standard_error


@pytest.mark.parametrize(
    ("right_s", "wrong_s", "area"),
    [
        ([1.0, 2.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.0], 0.5),
        ([1.0, 4.0], [2.0, 3.0], 0.5),
        ([1.0, 3.0], [2.0, 4.0], 0.75),
    ],
)
def test_the_area_is_how_often_a_right_guess_is_answered_sooner(
    right_s: list[float], wrong_s: list[float], area: float
) -> None:
    assert area_under_curve(right_s, wrong_s) == area


def test_the_error_of_an_area_is_that_of_the_rank_sum_where_both_are_alike() -> None:
    # For an area of 0.5 the formula is near (m + n + 1) / 12 mn, the variance of Mann and Whitney's test.
    assert standard_error(0.5, 100) == pytest.approx((201 / 120_000) ** 0.5, rel=0.01)
    assert standard_error(1.0, 100) == 0.0
