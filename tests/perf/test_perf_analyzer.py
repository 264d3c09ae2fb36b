from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from perf.server.load_tools import Tool, error_of, missing_libraries
from perf.server.perf_analyzer import figures, requests_of, run_level

from naiad.errors import InternalError

SECOND = 10**9


def request(sent_s: float, responses: list[tuple[float, int]]) -> dict[str, Any]:
    """Of an export: when its responses came, and how many tokens each brought."""
    return {
        "timestamp": int(sent_s * SECOND),
        "response_timestamps": [int(when_s * SECOND) for when_s, _ in responses],
        "response_outputs": [{"text_output": "x", "num_output_tokens": count} for _, count in responses],
    }


def test_times_are_made_from_the_export() -> None:
    requests = [
        request(10.0, [(10.5, 1), (11.0, 1), (12.0, 2)]),
        request(11.0, [(12.0, 1), (12.5, 3), (14.0, 0)]),
    ]

    row = figures(requests, num_tokens=4)

    assert (row["requests"], row["requests/s"], row["tokens/s"]) == (2, 0.5, 2.0)
    assert row["ttft_p50_s"] == 0.75
    assert row["latency_p50_s"] == 1.75
    # Gaps: 0.5, 0.5, 0.5 and three times 0.5 / 3.
    assert (row["itl_p50_s"], row["itl_p99_s"]) == (pytest.approx(1 / 3, abs=1e-4), 0.5)


def test_an_export_that_breaks_off_has_no_requests() -> None:
    whole = json.dumps({"experiments": [{"requests": [request(0.0, [(1.0, 4)])]}]})
    found = requests_of(whole)
    assert found is not None
    assert figures(found, num_tokens=4)["requests"] == 1
    assert requests_of(whole[:-20]) is None
    assert requests_of("") is None


@pytest.mark.parametrize("num_broken", [0, 2, 5])
def test_a_level_is_run_again_if_its_export_breaks_off(tmp_path: Path, num_broken: int) -> None:
    whole = json.dumps({"experiments": [{"requests": [request(0.0, [(1.0, 4)])]}]})
    runs = tmp_path / "runs"
    runs.touch()
    program = tmp_path / "perf_analyzer"
    program.write_text(
        f"""#!/bin/sh
echo >> {runs}
while [ "$1" != --profile-export-file ]; do shift; done
[ $(wc -l < {runs}) -gt {num_broken} ] && echo '{whole}' > "$2" || echo '{whole[:-9]}' > "$2"
"""
    )
    program.chmod(0o755)
    args = argparse.Namespace(served_model="llm", prompt_tokens=1, output_tokens=4)
    tool, level = Tool(program, {"PATH": "/usr/bin:/bin"}), ("concurrency", 1.0, 1)
    if num_broken < 5:
        assert run_level(tool, "nowhere", level, args)["requests"] == 1
        assert len(runs.read_text()) == num_broken + 1
    else:
        with pytest.raises(InternalError, match="no whole export in 5 runs"):
            run_level(tool, "nowhere", level, args)


def test_an_answer_that_is_not_whole_is_no_figure() -> None:
    with pytest.raises(InternalError, match="3 tokens instead of 4"):
        figures([request(0.0, [(1.0, 3)])], num_tokens=4)


def test_libraries_that_are_missing_are_named() -> None:
    listing = """\tlinux-vdso.so.1 (0x00007f2e639fd000)
\tlibb64.so.0d => not found
\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f2e639cd000)
\tlibcudart.so.12 => not found
"""

    assert missing_libraries(listing) == ["libb64.so.0d", "libcudart.so.12"]


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("read\nError: no such rate\nUsage: …\n --version", "Error: no such rate"),
        ("error: no server\n", "error: no server"),
        ("Killed\n", "Killed"),
    ],
)
def test_the_error_is_found_before_the_help(output: str, error: str) -> None:
    assert error_of(output) == error
