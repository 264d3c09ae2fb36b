from __future__ import annotations

from pathlib import Path

import pytest
from perf.common import plots as common_plots
from perf.peers import markdown
from perf.peers.contestants import Contestant
from perf.peers.plots import save_plots
from perf.peers.shapes import Shape

OURS = Contestant("naiad x", "", "naiad", "checkpoint", "16-bit", 2, 2, {})
PEER = Contestant("peer", "peer", "llama_cpp", "checkpoint", "16-bit", 2, 2, {})
SHAPES = (Shape("decode", 1, 128, 128), Shape("decode", 8, 128, 128), Shape("prefill", 1, 256, 1))
ROWS = [
    {
        **{"shape": shape.name, "contestant": each.name, "group": "16-bit", "tokens_per_s": 1234.5},
        **{"spread": 0.05, "best_peer": "peer", "of_best_peer": 1.5, "first_token_s": 0.5},
        **{"of_memory_bound": 0.812, "of_compute_bound": 0.1, "read_gb_per_s": 40.0, "peak_gop_per_s": 400},
    }
    for shape in SHAPES
    for each in (OURS, PEER)
]


def test_speeds_have_a_column_for_each_contestant_and_empty_cells() -> None:
    lines = markdown.speeds(ROWS[:3]).splitlines()
    assert lines[0] == "| tokens/s | naiad x | peer |"
    assert lines[2:] == ["| decode 1 × 128+128 | 1,234 | 1,234 |", "| decode 8 × 128+128 | 1,234 |  |"]


def test_ratios_are_of_naiad_only() -> None:
    lines = markdown.ratios(ROWS[:2], [OURS, PEER]).splitlines()
    assert lines[2:] == ["| decode 1 × 128+128 | naiad x | 1,234 | 5% | peer | 1.5 | 81% | 10% |"]


def test_who_started_is_listed_without_memory_too() -> None:
    memory = {"naiad x": {"peak_rss_mib": 512.5, "pss_mib": 99.5}}
    lines = markdown.starts({"naiad x": 2.0, "peer": 0.5}, memory).splitlines()
    assert lines[2:] == ["| naiad x | 2.0 | 512 | 99.5 |", "| peer | 0.5 |  |  |"]


def test_the_trace_names_those_that_cannot_serve_it() -> None:
    row = {
        **{"contestant": "naiad x", "offered_per_s": 2.5, "saturated_per_s": None},
        **{"ttft_p50_s": 0.1, "ttft_p95_s": 0.2, "itl_p50_s": 0.01, "itl_p95_s": 0.02},
    }
    lines = markdown.trace([row], [PEER]).splitlines()
    assert lines[2] == "| naiad x | 2.5 |  | 0.1 | 0.2 | 0.01 | 0.02 |"
    assert lines[3].startswith("| peer | cannot begin a request while others run |")
    assert {line.count("|") for line in lines} == {8}


def test_plots_are_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_plots, "plot_path", lambda name: tmp_path / f"{name}.png")
    assert save_plots(ROWS, SHAPES, "peers") == ["peers.png", "peers-bounds.png"]
    assert all((tmp_path / name).stat().st_size for name in ("peers.png", "peers-bounds.png"))
    prefill_only = [row for row in ROWS if str(row["shape"]).startswith("prefill")]
    assert save_plots(prefill_only, SHAPES, "peers") == ["peers-bounds.png"]
