"""Runs sweeps with NVIDIA's perf_analyzer: concurrency (closed loop) and request rate (open loop).

    python -m perf.server.perf_analyzer [--served-model llm]

Each level is a separate run with its own prompts. Figures are computed from the times that perf_analyzer
exports, which count from when a request was sent. Every answer must have all its tokens. For a request
rate, requests are sent at equal intervals, because perf_analyzer's random intervals are the same in each
run, and long at first.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.common.percentile import percentile
from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.common.token_times import TokenTimes
from perf.common.word_prompts import word_text
from perf.server.load_tools import Tool, perf_analyzer
from perf.server.serve_process import naiad_serve

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import InternalError, StartupError

# perf_analyzer ends some exports in the middle.
_NUM_TRIES = 5
_PERCENTS = (50, 90, 99)
_NS_PER_S = 1e9

Row = dict[str, Any]


def main() -> int:
    """Measure, print, plot and write; return 1 for an incomplete answer, 2 without perf_analyzer."""
    args = _parse()
    try:
        tool = perf_analyzer()
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model_dir = resolve_model(args.model)
    levels: list[tuple[str, float, int]] = [
        ("concurrency", level, max(10, round(args.requests_per_user * level))) for level in args.concurrency
    ]
    levels += [("rate", level, max(10, round(args.seconds * level))) for level in args.rates]
    rows: list[Row] = []
    with naiad_serve(["--model", str(model_dir)]) as server:
        run_level(tool, server.grpc, ("concurrency", 1, 2), args)
        for level in levels:
            try:
                rows.append(run_level(tool, server.grpc, level, args))
            except InternalError as error:
                print(f"error: {level[0]} {level[1]:g}: {error}", file=sys.stderr)
                return 1
            print(f"{level[0]} {level[1]:g} done", flush=True)
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name, "tool": "perf_analyzer of tritonclient 2.50.0"}
    print("plot:", _plot(rows, args), "written:", write_report("perf-analyzer", settings, rows))
    return 0


def run_level(tool: Tool, url: str, level: tuple[str, float, int], args: argparse.Namespace) -> Row:
    """One run of perf_analyzer, or several if it writes no whole export.

    Args:
        tool: perf_analyzer.
        url: HOST:PORT of the server's gRPC endpoint.
        level: "concurrency" or "rate", its value, number of requests.
        args: the served model, and the lengths of prompts and outputs.

    Raises:
        InternalError: perf_analyzer failed, wrote no whole export, or an answer is incomplete.
    """
    kind, value, num_requests = level
    for _ in range(_NUM_TRIES):
        exported = requests_of(_export_of(tool, url, level, args))
        if exported is not None:
            break
        print(f"{kind} {value:g}: perf_analyzer's export breaks off", file=sys.stderr)
    else:
        raise InternalError(f"perf_analyzer wrote no whole export in {_NUM_TRIES} runs")
    if len(exported) < num_requests:
        raise InternalError(f"{len(exported)} of {num_requests} requests were answered")
    return {"by": kind, "level": value} | figures(exported, args.output_tokens)


def requests_of(export: str) -> list[dict[str, Any]] | None:
    """The requests in perf_analyzer's export; None: it breaks off."""
    try:
        requests: list[dict[str, Any]] = json.loads(export)["experiments"][0]["requests"]
    except json.JSONDecodeError:
        return None
    return requests


def _export_of(tool: Tool, url: str, level: tuple[str, float, int], args: argparse.Namespace) -> str:
    kind, value, num_requests = level
    # The end of a rate's range is 1 by default, so it is given too.
    option = {
        "concurrency": ["--concurrency-range", f"{value:g}"],
        "rate": ["--request-rate-range", f"{value:g}:{value:g}:1"],
    }[kind]
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        data, export = Path(folder) / "input.json", Path(folder) / "export.json"
        data.write_text(json.dumps({"data": _inputs(level, args)}))
        tool.run(
            [
                *("-m", args.served_model, "-u", url, "-i", "grpc", "--async", "--streaming"),
                *("--input-data", str(data), "--profile-export-file", str(export)),
                *("--request-count", str(num_requests), *option),
            ]
        )
        return export.read_text()


def figures(requests: Sequence[Mapping[str, Any]], num_tokens: int) -> Row:
    """Compute rates and percentiles, in seconds, from perf_analyzer's export.

    Args:
        requests: each has the times in nanoseconds at which it was sent and its responses arrived, and the
            responses' outputs.
        num_tokens: expected number of tokens of each answer.

    Raises:
        InternalError: an answer has another number of tokens.
    """
    values: dict[str, list[float]] = {"latency": [], "ttft": [], "itl": []}
    for request in requests:
        times = TokenTimes()
        for when_ns, output in zip(request["response_timestamps"], request["response_outputs"], strict=True):
            since_s = (when_ns - request["timestamp"]) / _NS_PER_S
            values["itl"] += times.take(int(output.get("num_output_tokens", 0)), since_s)
        if times.num_tokens != num_tokens or times.first_s is None or times.last_s is None:
            raise InternalError(f"an answer has {times.num_tokens} tokens instead of {num_tokens}")
        values["ttft"].append(times.first_s)
        values["latency"].append(times.last_s)
    first_ns = min(request["timestamp"] for request in requests)
    last_ns = max(request["response_timestamps"][-1] for request in requests)
    seconds = (last_ns - first_ns) / _NS_PER_S
    row: Row = {
        "requests": len(requests),
        "requests/s": round(len(requests) / seconds, 2),
        "tokens/s": round(num_tokens * len(requests) / seconds, 1),
    }
    for name, numbers in values.items():
        for percent in _PERCENTS:
            row[f"{name}_p{percent}_s"] = round(percentile(numbers, percent), 4) if numbers else 0.0
    return row


def _inputs(level: tuple[str, float, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A prompt for each request; prompts differ between levels."""
    draw = random.Random(f"{level}")
    every = {"ignore_eos": [True], "return_num_output_tokens": [True]}
    inputs: list[dict[str, Any]] = []
    for _ in range(level[2]):
        if args.served_model == "llm":
            ids = [draw.randrange(1000, 10_000) for _ in range(args.prompt_tokens)]
            lengths = {"input_lengths": [len(ids)], "request_output_len": [args.output_tokens]}
            prompt = {"content": ids, "shape": [len(ids)]}
            inputs.append({"input_ids": prompt, **lengths, "streaming": [True], **every})
        else:
            text = [word_text(args.prompt_tokens, draw)]
            inputs.append({"text_input": text, "max_tokens": [args.output_tokens], "stream": [True], **every})
    return inputs


def _plot(rows: Sequence[Row], args: argparse.Namespace) -> str:
    of = {kind: [row for row in rows if row["by"] == kind] for kind in ("concurrency", "rate")}
    latency = {
        f"p{percent}, by {kind}": (_column(some, "tokens/s"), _column(some, f"latency_p{percent}_s"))
        for kind, some in of.items()
        for percent in (50, 99)
    }
    panels = [Panel("tokens/s", "latency of the whole answer, s", latency)]
    for kind, xlabel in (("concurrency", "concurrency"), ("rate", "requests/s sent")):
        for name, ylabel in (("ttft", "time to first token, s"), ("itl", "time between tokens, s")):
            lines = {
                f"p{percent}": (_column(of[kind], "level"), _column(of[kind], f"{name}_p{percent}_s"))
                for percent in _PERCENTS
            }
            panels.append(Panel(xlabel, ylabel, lines))
    title = f"perf_analyzer: {args.served_model}, {args.prompt_tokens} + {args.output_tokens} tokens"
    return save_panels("perf-analyzer", title, panels)


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--served-model", default="ensemble", choices=("ensemble", "text", "llm"))
    add(
        "--concurrency",
        type=_numbers,
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,…",
        help="levels, closed loop",
    )
    add("--rates", type=_numbers, default=[0.5, 1, 2, 3], metavar="R,…", help="requests/s, open loop")
    add(
        "--requests-per-user",
        type=float,
        default=2,
        metavar="N",
        help="requests per user at each concurrency, at least 10 in total",
    )
    add("--seconds", type=float, default=20, metavar="S", help="duration of each rate")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="approximate for a text model")
    add("--output-tokens", type=int, default=32, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
