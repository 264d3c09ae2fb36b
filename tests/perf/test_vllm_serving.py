"""What is asked of `vllm bench serve`, and what is read from its report; without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perf.server.vllm_serving import BenchLoad, bench_options, bench_row

LOAD = BenchLoad(streams=4, prompt_tokens=64, output_tokens=32, repeats=2)


def report(completed: int = 8) -> dict[str, Any]:
    made: dict[str, Any] = {"completed": completed, "output_throughput": 12.345}
    for name, factor in (("ttft", 10), ("itl", 1)):
        made |= {f"p{each}_{name}_ms": each * factor / 100 for each in (50, 95, 99)}
    return made


def test_a_report_becomes_a_row() -> None:
    assert bench_row(report(), LOAD) == {
        "streams": 4,
        "tokens/s": 12.3,
        "TTFT p50": 5.0,
        "TTFT p95": 9.5,
        "gap p50": 0.5,
        "gap p95": 0.95,
        "gap p99": 0.99,
    }


def test_failed_requests_are_no_figures() -> None:
    with pytest.raises(RuntimeError, match="completed 7 of 8 requests"):
        bench_row(report(7), LOAD)


def test_both_servers_are_asked_for_the_same() -> None:
    ours, theirs = (bench_options(at, "m", Path("/m"), LOAD, Path("/r")) for at in ("a:1", "b:2"))
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == [
        ("http://a:1", "http://b:2")
    ]
    words = dict(zip(ours[:-3:2], ours[1:-3:2], strict=True))
    assert (words["--num-prompts"], words["--max-concurrency"], words["--temperature"]) == ("8", "4", "0")
