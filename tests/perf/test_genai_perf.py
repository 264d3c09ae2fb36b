from __future__ import annotations

from typing import Any

import pytest
from perf.server.genai_perf import figures

from naiad.errors import InternalError


def export(num_answers: float, num_tokens: float) -> dict[str, Any]:
    times = {"p50": 1.04, "p90": 2.0, "p99": 3.0}
    return {
        "request_count": {"avg": num_answers},
        "output_sequence_length": {"avg": num_tokens},
        "request_throughput": {"avg": 2.345},
        "output_token_throughput": {"avg": 70.21},
        "time_to_first_token": times,
        "inter_token_latency": times,
        "request_latency": times,
    }


def test_its_figures_are_taken_over() -> None:
    row = figures(export(10.0, 32.9), num_requests=10, num_tokens=32)

    assert (row["requests"], row["requests/s"], row["tokens/s"]) == (10, 2.35, 70.2)
    assert (row["ttft_p50_ms"], row["itl_p90_ms"], row["latency_p99_ms"]) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("num_answers", "num_tokens"), [(9.0, 32.0), (10.0, 28.0), (10.0, 36.0)])
def test_answers_that_are_missing_or_not_whole_are_no_figure(num_answers: float, num_tokens: float) -> None:
    with pytest.raises(InternalError, match=r"requests were answered|tokens on average"):
        figures(export(num_answers, num_tokens), num_requests=10, num_tokens=32)
