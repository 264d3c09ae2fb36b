"""Which of a stream's gaps count as those beside other texts."""

from __future__ import annotations

import pytest
from perf.engine.large_schema import gaps_between


@pytest.mark.parametrize(
    ("begin_s", "end_s", "expected"),
    [
        (4.0, 9.0, [2.0, 4.0]),  # within a gap, and exactly at a token
        (5.0, 9.5, [4.0, 8.0]),  # exactly at one, and within a gap
        (0.0, 99.0, [1.0, 2.0, 2.0, 4.0, 8.0]),
        (18.0, 99.0, []),
    ],
)
def test_gaps_count_that_have_a_part_in_the_time_of_the_texts(
    begin_s: float, end_s: float, expected: list[float]
) -> None:
    assert gaps_between([0.0, 1.0, 3.0, 5.0, 9.0, 17.0], begin_s, end_s) == expected
