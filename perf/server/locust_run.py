"""Runs Locust against its own server: gRPC and SSE users, steady and in a ramp.

    python -m perf.server.locust_run

The users are those of `perf/server/locustfile.py`; percentiles are computed and rounded by Locust.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from perf.common.plots import Line, Panel, save_panels
from perf.common.report import ROOT, print_rows, write_report
from perf.server.serve_process import Served, naiad_serve
from perf.server.sse import sse_events

from naiad.cli.checkpoints.fetch import resolve_model
from naiad_client import Client

_LOCUSTFILE = ROOT / "perf" / "server" / "locustfile.py"
_CHECKED_PROMPTS = ("The capital of France is", "A cat and a dog", "In the morning")
_CHECKED_TOKENS = 16
# Locust does not wait for requests at the end of a run, but it needs time to start and to stop.
_LOCUST_OVERHEAD_S = 120
_PERCENTS = ("50%", "90%", "95%", "99%")

Row = dict[str, Any]


def main() -> int:
    """Measure, print, plot and write; return 1 if an answer was wrong or a request failed."""
    args = _parse()
    model_dir = resolve_model(args.model)
    rows: list[Row] = []
    histories: dict[str, list[Mapping[str, str]]] = {}
    options = ["--model", str(model_dir), "--max-num-seqs", str(max(args.users, 8))]
    with naiad_serve(options) as server, tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        if not _is_same(server, args.served_model):
            return 1
        for shape in ("steady", "ramp"):
            prefix = Path(folder) / shape
            code = _run_locust(server, shape, prefix, args)
            rows += [{"shape": shape, **row} for row in event_rows(_read(f"{prefix}_stats.csv"))]
            histories[shape] = _read(f"{prefix}_stats_history.csv")
            if code:
                print_rows(rows)
                print(f"locust ended with {code} in the shape {shape}: no figures are kept", file=sys.stderr)
                return 1
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name}
    print("plot:", _plot(histories, args), "written:", write_report("locust", settings, rows))
    return 0


def event_rows(stats: Sequence[Mapping[str, str]]) -> list[Row]:
    """The figures in a `…_stats.csv` for each kind of event, in milliseconds."""
    rows = []
    for line in stats:
        if line["Name"] == "Aggregated":
            continue
        tokens_per_s = float(line["Requests/s"]) * float(line["Average Content Size"])
        rows.append(
            {
                "users": line["Type"],
                "event": line["Name"],
                "count": int(line["Request Count"]),
                "failures": int(line["Failure Count"]),
                "mean_ms": round(float(line["Average Response Time"]), 1),
                **{f"p{percent[:-1]}_ms": _number(line[percent]) for percent in _PERCENTS},
                "per_s": round(float(line["Requests/s"]), 2),
                "tokens/s": round(tokens_per_s, 1) if line["Name"] == "request" else "",
            }
        )
    return rows


def history_lines(history: Sequence[Mapping[str, str]], name: str, column: str) -> dict[str, Line]:
    """An event's values over the seconds of a run, for each protocol."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    start_s = int(history[0]["Timestamp"])
    for line in history:
        value = _number(line[column])
        # Locust writes 0 before the first event.
        if line["Name"] != name or not value:
            continue
        seconds, values = lines.setdefault(line["Type"], ([], []))
        seconds.append(int(line["Timestamp"]) - start_s)
        values.append(value)
    return dict(lines)


def _number(text: str) -> float | None:
    return None if text in ("", "N/A") else float(text)


def _run_locust(server: Served, shape: str, prefix: Path, args: argparse.Namespace) -> int:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary"),
        *("--grpc-url", server.grpc, "--http-url", server.http, "--model", args.served_model),
        *("--users", str(args.users), "--run-time", f"{args.seconds}s", "--shape", shape),
        *("--prompt-words", str(args.prompt_words), "--max-tokens", str(args.max_tokens)),
        *("--csv", str(prefix), "--csv-full-history", "--loglevel", "WARNING"),
        *(("--processes", str(args.processes)) if args.processes > 1 else ()),
        *args.user_classes,
    ]
    timeout_s = args.seconds + _LOCUST_OVERHEAD_S
    done = subprocess.run(
        command, cwd=ROOT, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


def _is_same(server: Served, model: str) -> bool:
    """Whether gRPC and SSE return the same greedy texts; this also warms up the server."""
    with Client(server.grpc, model=model) as client, requests.Session() as session:
        for prompt in _CHECKED_PROMPTS:
            with client.generate(prompt, max_tokens=_CHECKED_TOKENS, ignore_eos=True) as chunks:
                by_grpc = "".join(chunk.text for chunk in chunks)
            events = sse_events(session, server.http, model, prompt, _CHECKED_TOKENS)
            by_sse = "".join(event.get("text_output", "") for event in events)
            if by_grpc != by_sse:
                print(f"gRPC and SSE return different texts: {by_grpc!r}, {by_sse!r}", file=sys.stderr)
                return False
    return True


def _read(path: str) -> list[Mapping[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _plot(histories: Mapping[str, Sequence[Mapping[str, str]]], args: argparse.Namespace) -> str:
    users: dict[str, Line] = {}
    first: dict[str, Line] = {}
    inter: dict[str, Line] = {}
    for shape, history in histories.items():
        users[shape] = history_lines(history, "Aggregated", "User Count").get("", ([], []))
        for lines, name in ((first, "ttft"), (inter, "itl")):
            by_protocol = history_lines(history, name, "95%")
            lines.update({f"{shape}, {protocol}": line for protocol, line in by_protocol.items()})
    panels = [
        Panel("seconds", "users", users),
        Panel("seconds", "time to first token, p95 of the last 10 s, ms", first),
        Panel("seconds", "time between tokens, p95 of the last 10 s, ms", inter),
    ]
    return save_panels("locust", f"Locust, at most {args.users} users of {args.served_model}", panels)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--served-model", default="ensemble", choices=("ensemble", "text"))
    add("--user-classes", nargs="+", default=[], metavar="CLASS", help="GrpcUser, SseUser; default: both")
    add("--users", type=int, default=8, metavar="N", help="at most")
    add("--seconds", type=int, default=60, metavar="S", help="duration of each shape")
    add("--prompt-words", type=int, default=64, metavar="N")
    add("--max-tokens", type=int, default=32, metavar="N")
    add("--processes", type=int, default=1, metavar="N", help="number of Locust's worker processes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
