"""Runs NVIDIA's GenAI-Perf on the presets for TensorRT-LLM's ensemble and for vLLM's model.

    python -m perf.server.genai_perf

GenAI-Perf drives perf_analyzer and is not changed for Naiad; the check is that all its requests are
answered in full. It counts tokens by tokenizing the answers again, so its lengths may be off by a few
percent. It sends no temperature: then the first preset is greedy, and the second samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.server.load_tools import Tool, genai_perf
from perf.server.serve_process import naiad_serve

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import InternalError, StartupError

_TOLERANCE = 0.1
_METRICS = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "latency": "request_latency"}
_PERCENTS = (50, 90, 99)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of requests that GenAI-Perf sends.

    Attributes:
        preset: a preset of `naiad repository create`.
        model: the model that gets the requests.
        backend: GenAI-Perf's name for the format.
    """

    preset: str
    model: str
    backend: str


FORMATS = (Format("trtllm", "ensemble", "tensorrtllm"), Format("vllm", "vllm_model", "vllm"))


def main() -> int:
    """Measure, print, plot and write; return 1 if answers are incomplete, 2 if GenAI-Perf is unavailable."""
    args = _parse()
    try:
        tool = genai_perf()
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model_dir = resolve_model(args.model)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        for each in FORMATS:
            repository = _create_repository(each, model_dir, Path(folder))
            with naiad_serve(["--model-repository", str(repository)]) as server:
                for concurrency in args.concurrency:
                    try:
                        rows.append(run_level(tool, each, (server.grpc, str(model_dir)), concurrency, args))
                    except InternalError as error:
                        print(f"error: {each.preset}, concurrency {concurrency}: {error}", file=sys.stderr)
                        return 1
                    print(f"{each.preset}, concurrency {concurrency} done", flush=True)
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name, "tool": "genai-perf 0.0.16"}
    print("plot:", _plot(rows, args), "written:", write_report("genai-perf", settings, rows))
    return 0


def run_level(
    tool: Tool, each: Format, where: tuple[str, str], concurrency: int, args: argparse.Namespace
) -> Row:
    """One run of GenAI-Perf.

    Args:
        tool: GenAI-Perf.
        each: the kind of requests.
        where: HOST:PORT of the server's gRPC endpoint, and the tokenizer's directory.
        concurrency: number of requests in flight.
        args: the lengths of prompts and outputs.

    Raises:
        InternalError: GenAI-Perf failed, or answers are incomplete.
    """
    url, tokenizer = where
    num_requests = max(10, 2 * concurrency)
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        tool.run(
            [
                *("profile", "-m", each.model, "--backend", each.backend, "-u", url),
                *("--endpoint-type", "kserve", "--streaming", "--tokenizer", tokenizer),
                *("--concurrency", str(concurrency), "--request-count", str(num_requests)),
                *("--num-dataset-entries", str(num_requests), "--random-seed", str(concurrency)),
                *("--synthetic-input-tokens-mean", str(args.prompt_tokens)),
                *("--output-tokens-mean", str(args.output_tokens), "--output-tokens-mean-deterministic"),
                *("--artifact-dir", folder),
            ]
        )
        export = next(Path(folder).rglob("profile_export_genai_perf.json"))
        exported = json.loads(export.read_text())
    row = {"format": each.preset, "concurrency": concurrency}
    return row | figures(exported, num_requests, args.output_tokens)


def figures(exported: Mapping[str, Any], num_requests: int, num_tokens: int) -> Row:
    """Extract GenAI-Perf's own figures.

    Args:
        exported: its `profile_export_genai_perf.json`; times in milliseconds.
        num_requests: expected number of requests.
        num_tokens: expected length of each answer.

    Raises:
        InternalError: answers are missing or have another length.
    """
    num_answers = round(exported["request_count"]["avg"])
    mean_length = exported["output_sequence_length"]["avg"]
    if num_answers != num_requests:
        raise InternalError(f"{num_answers} of {num_requests} requests were answered")
    if abs(mean_length - num_tokens) > _TOLERANCE * num_tokens:
        raise InternalError(f"answers have {mean_length:.1f} tokens on average instead of {num_tokens}")
    row: Row = {
        "requests": num_answers,
        "requests/s": round(exported["request_throughput"]["avg"], 2),
        "tokens/s": round(exported["output_token_throughput"]["avg"], 1),
    }
    for name, metric in _METRICS.items():
        for percent in _PERCENTS:
            row[f"{name}_p{percent}_ms"] = round(exported[metric][f"p{percent}"], 1)
    return row


def _create_repository(each: Format, model_dir: Path, folder: Path) -> Path:
    repository = folder / each.preset
    command = [sys.executable, "-m", "naiad.cli.main", "repository", "create", "--preset", each.preset]
    command += ["--model", str(model_dir), "--name", "measured", str(repository)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return repository


def _plot(rows: Sequence[Row], args: argparse.Namespace) -> str:
    panels = []
    for name, label in (("ttft", "time to first token, ms"), ("itl", "time between tokens, ms")):
        lines = {
            f"{each.preset}, p{percent}": _line(rows, each, f"{name}_p{percent}_ms")
            for each in FORMATS
            for percent in (50, 99)
        }
        panels.append(Panel("concurrency", label, lines))
    speed = {each.preset: _line(rows, each, "tokens/s") for each in FORMATS}
    panels.append(Panel("concurrency", "tokens/s", speed))
    title = f"GenAI-Perf: {args.prompt_tokens} + {args.output_tokens} tokens"
    return save_panels("genai-perf", title, panels)


def _line(rows: Sequence[Row], each: Format, column: str) -> tuple[list[float], list[float]]:
    mine = [row for row in rows if row["format"] == each.preset]
    return [row["concurrency"] for row in mine], [row[column] for row in mine]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--concurrency", type=_numbers, default=[1, 4, 16], metavar="N,…")
    add("--prompt-tokens", type=int, default=64, metavar="N")
    add("--output-tokens", type=int, default=32, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
