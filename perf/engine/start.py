"""Measures starts until the first token: without the start cache, the first with it, and later ones.

    python -m perf.engine.start --repeats 5 --server

Every start is a process of its own. All must generate the same ids, or no time is reported. The cache lies
in a temporary directory with links to the model's files, so the model's own cache stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perf.common.report import ROOT, print_rows, write_report
from perf.server.serve_process import naiad_serve

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config.engine_config import CPU_QUANTIZATIONS

_MIB = 1 << 20


def main() -> int:
    """Measure, print and write the results; return 1 if the ids differ."""
    args = _parse()
    model_dir = resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="naiad-start-") as folder:
        linked = Path(folder) / "model"
        _link(model_dir, linked)
        starts = measure_starts(linked, args)
        if len({tuple(start["ids"]) for start in starts}) != 1:
            print("the starts generate different ids: no time is reported", file=sys.stderr)
            return 1
        rows = [_row(start) for start in starts]
        if args.server:
            for number in range(args.repeats):
                served = {"start": f"server, later {number + 1}", **_served_start(linked, args)}
                rows.append({name: served.get(name, "") for name in rows[0]})
    print_rows(rows)
    later = [row["total s"] for row in rows if row["start"].startswith("later")]
    print(
        f"later starts: median {statistics.median(later):.2f} s, least {min(later):.2f} s to the first token"
    )
    settings = vars(args) | {"model": model_dir.name}
    print("written:", write_report("start", settings, rows))
    return 0


def measure_starts(model_dir: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start without the cache, then for the first time with it, then as often as asked.

    Args:
        model_dir: has no cache yet.
        args: `dtype`, `quantization`, `drafter` and `repeats`.

    Returns:
        Of each start what `perf.engine.timed_start` reports, its name as "start", and how large the packed
        weights in the cache are as "packed_bytes".
    """
    settings = {name: getattr(args, name) for name in ("dtype", "quantization", "drafter")}
    settings["model_dir"] = str(model_dir)
    names = ["without cache", "first", *(f"later {number + 1}" for number in range(args.repeats))]
    starts = []
    for name in names:
        report = _start(settings | {"start_cache": name != "without cache"})
        files = list((model_dir / ".naiad").glob("*.weights"))
        starts.append({"start": name, **report, "packed_bytes": sum(each.stat().st_size for each in files)})
    starts[0]["packed_bytes"] = starts[-1]["packed_bytes"]
    return starts


def _start(settings: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "perf.engine.timed_start", str(time.time()), json.dumps(settings)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


def _row(start: Mapping[str, Any]) -> dict[str, Any]:
    seconds = start["seconds"]
    phases = ("python", "import torch", "import naiad", "tokenizer", "weights", "measuring")
    named = {name: round(seconds.get(name, 0.0), 2) for name in (*phases, "the rest", "first token")}
    packed = start["packed_bytes"]
    return {
        "start": start["start"],
        **named,
        "total s": round(sum(seconds.values()), 2),
        "loading MiB": round(start["loading_bytes"] / _MIB),
        "of packed": round(start["loading_bytes"] / packed, 2) if packed else "",
    }


def _served_start(model_dir: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds from the command to the first token of a stream."""
    began = time.monotonic()
    options = ["--model", str(model_dir), "--dtype", args.dtype, "--quantization", args.quantization]
    with naiad_serve(options) as served:
        body = json.dumps({"text_input": "One, two,", "max_tokens": 4, "stream": True}).encode()
        url = f"http://{served.http}/v2/models/ensemble/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            line = answer.readline()
            taken_s = time.monotonic() - began
    assert line.startswith(b"data:"), line
    assert b"error" not in line, line
    return {"total s": round(taken_s, 2)}


def _link(model_dir: Path, linked: Path) -> None:
    linked.mkdir()
    for path in model_dir.iterdir():
        if path.is_file():
            os.symlink(path.resolve(), linked / path.name)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=CPU_QUANTIZATIONS)
    parser.add_argument("--drafter", default="none", choices=("none", "ngram", "suffix", "self"))
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="later starts")
    parser.add_argument("--server", action="store_true", help="also start the server as often")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
