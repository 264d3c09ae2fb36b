from __future__ import annotations

import subprocess
import sys

import pytest
from perf.common.report import ROOT
from perf.common.token_times import TokenTimes
from perf.server.load_shapes import users_at
from perf.server.locust_run import event_rows, history_lines


def test_gaps_sum_up_to_the_time_from_the_first_token_to_the_last() -> None:
    times = TokenTimes()

    gaps = [times.take(2, 1.0), times.take(0, 1.5), times.take(1, 2.0), times.take(4, 4.0)]

    assert gaps == [[0.0], [], [1.0], [0.5] * 4]
    assert sum(map(sum, gaps)) == 4.0 - 1.0
    assert (times.first_s, times.num_tokens) == (1.0, 7)
    assert times.inter_token_s == 0.5


def test_one_token_has_no_gap() -> None:
    times = TokenTimes()

    assert times.take(1, 1.0) == []
    assert times.inter_token_s is None


def line(kind: str, name: str, **values: str) -> dict[str, str]:
    every = dict.fromkeys(("50%", "90%", "95%", "99%"), "N/A")
    counts = {"Request Count": "3", "Failure Count": "1", "Requests/s": "1.5"}
    means = {"Average Response Time": "20.04", "Average Content Size": "8"}
    return {"Type": kind, "Name": name, **every, **counts, **means, **values}


def test_figures_of_locust_are_read() -> None:
    stats = [line("sse", "itl", **{"95%": "40"}), line("grpc", "request"), line("", "Aggregated")]

    itl, request = event_rows(stats)

    assert (itl["users"], itl["count"], itl["failures"], itl["mean_ms"]) == ("sse", 3, 1, 20.0)
    assert (itl["p95_ms"], itl["p50_ms"], itl["tokens/s"]) == (40.0, None, "")
    assert request["tokens/s"] == 12.0


def test_a_history_becomes_a_line_for_each_protocol() -> None:
    history = [
        line("", "Aggregated", Timestamp="100"),
        line("grpc", "ttft", Timestamp="101"),
        line("grpc", "ttft", Timestamp="102", **{"95%": "7"}),
        line("sse", "ttft", Timestamp="103", **{"95%": "8"}),
    ]

    assert history_lines(history, "ttft", "95%") == {"grpc": ([2], [7.0]), "sse": ([3], [8.0])}


@pytest.mark.parametrize(
    ("time_s", "shape", "users"),
    [(0, "steady", 10), (40, "steady", None), (0, "ramp", 3), (10, "ramp", 5), (39, "ramp", 10)],
)
def test_users_of_a_shape(time_s: float, shape: str, users: int | None) -> None:
    assert users_at(time_s, 40.0, 10, shape) == users


def test_locust_finds_the_users() -> None:
    command = [sys.executable, "-m", "locust", "-f", "perf/server/locustfile.py", "--list"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.split()[-2:] == ["GrpcUser", "SseUser"], done.stderr
