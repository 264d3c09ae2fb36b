from __future__ import annotations

from pathlib import Path

import pytest
from perf.common.percentile import percentile
from perf.server.open_loop import Answer, Arrival
from perf.server.replay import Limits, figures
from perf.server.traces import Scaling, TraceRequest, read_trace, scaled_arrivals

from naiad.errors import ConfigError

DATA = Path(__file__).parents[2] / "perf" / "data"
AS_RECORDED = Scaling(
    speed=1.0, prompt_scale=1.0, output_scale=1.0, start_s=0.0, duration_s=1e9, window_tokens=10**6
)


def answer(due_s: float, sent_s: float, times_s: list[float], error: str = "") -> Answer:
    """Times count from the moment it was due."""
    result = Answer(Arrival(due_s, [1], len(times_s)), sent_s=sent_s, error=error)
    for time_s in times_s:
        result.times.take(1, time_s)
    result.end_s = times_s[-1] if times_s else sent_s
    return result


def test_the_traces_are_read() -> None:
    azure = read_trace(DATA / "azure_llm_2023_conversation_10min.csv")
    code = read_trace(DATA / "azure_llm_2023_code_10min.csv")
    mooncake = read_trace(DATA / "mooncake_fast25_synthetic.jsonl")

    assert (len(azure), azure[0]) == (2867, TraceRequest(0.0, 374, 44))
    assert azure[1].due_s == pytest.approx(4.314579)
    assert (len(code), code[0]) == (2737, TraceRequest(0.0, 327, 6))
    assert (len(mooncake), mooncake[0].prompt_tokens, len(mooncake[0].block_ids)) == (3993, 40160, 79)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,Tokens\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,1\n"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 4}\n'),
        ("a.jsonl", "TIMESTAMP\n"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError, match="--trace"):
        read_trace(tmp_path / name)


def test_a_part_is_sped_up_scaled_and_clipped() -> None:
    trace = [TraceRequest(0.0, 10, 10), TraceRequest(10.0, 100, 20), TraceRequest(14.0, 400, 40)]
    scaling = Scaling(
        speed=2.0, prompt_scale=0.5, output_scale=0.1, start_s=10.0, duration_s=5.0, window_tokens=150
    )

    arrivals, num_clipped = scaled_arrivals(trace, scaling, vocab_size=2000)

    assert [(each.due_s, len(each.prompt_token_ids), each.num_tokens) for each in arrivals] == [
        (0.0, 50, 2),
        (2.0, 146, 4),
    ]
    assert num_clipped == 1


def test_equal_blocks_are_equal_tokens() -> None:
    trace = [TraceRequest(0.0, 1100, 1, (0, 1, 2)), TraceRequest(1.0, 1536, 1, (0, 1, 3))]

    (first, second), _ = scaled_arrivals(trace, AS_RECORDED, vocab_size=50_000)

    a, b = first.prompt_token_ids, second.prompt_token_ids
    assert (len(a), len(b)) == (1100, 1536)
    assert a[:1024] == b[:1024]
    assert a[1024:] != b[1024:1100]


def test_times_count_from_when_a_request_was_due() -> None:
    # The generator fell behind by 5 s: the second request's wait is not hidden.
    answers = [
        answer(0.0, 0.0, [0.1, 0.2, 0.3]),
        answer(1.0, 5.0, [5.1, 5.2]),
        answer(2.0, 0.0, [], "broken"),
    ]

    row = figures(answers, Limits(first_token_s=1.0, inter_token_s=0.15), duration_s=10.0)

    assert (row["sent"], row["served"], row["failed"], row["good"]) == (3, 2, 1, 1)
    assert row["ttft_p50_s"] == pytest.approx(2.6)
    assert row["itl_p50_s"] == pytest.approx(0.1)
    assert row["good/s"] == 0.1
    assert row["sent_late_p99_s"] == round(percentile([0.0, 5.0, 0.0], 99), 3)


def test_what_the_server_refuses_for_its_target_counts_as_refused() -> None:
    late = "Exceeds maximum queue size, the queue is full: the first token is expected in 3.1 s"
    answers = [answer(0.0, 0.0, [0.1, 0.2]), answer(1.0, 1.0, [], f"{late} (target_first_token_ms = 2000)")]

    row = figures(answers, Limits(first_token_s=1.0, inter_token_s=0.15), duration_s=10.0)

    assert (row["sent"], row["served"], row["refused"], row["failed"], row["good"]) == (2, 1, 1, 0, 1)


@pytest.mark.parametrize(
    ("times_s", "is_good"), [([0.9, 1.0], True), ([1.1, 1.2], False), ([0.5, 0.8], False), ([0.5], True)]
)
def test_a_good_request_keeps_to_both_limits(times_s: list[float], is_good: bool) -> None:
    assert Limits(1.0, 0.2).allow(answer(0.0, 0.0, times_s)) == is_good
