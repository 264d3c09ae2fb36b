"""Compares Naiad on a CPU with vLLM, llama.cpp, OpenVINO GenAI and transformers, in turns, in one run.

    python -m perf.peers.bench --quick

Each engine runs in a process and an environment of its own, which is installed under build/peers at the
first run. All get the same token ids, threads and room for KV. Before anything is timed, each engine's greedy
tokens are compared with those of transformers in float32. Between its turns an engine's process is stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.common.plots import Line, Panel, save_panels
from perf.common.report import ROOT, print_rows, write_report
from perf.peers.arena import Arena, Prompts
from perf.peers.contestants import REFERENCE, Contestant, naiad, peers
from perf.peers.read_bandwidth import read_bytes_per_s
from perf.peers.shapes import LONG, QUICK, REHEARSAL, Shape, step_bytes, weight_bytes
from perf.peers.summary import Row, Turn, summarize
from tokenizers import Tokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import ModelConfig
from naiad.config.cores import num_compute_threads
from naiad.errors import StartupError

_NAIAD = ["bf16:dtype=bfloat16", "f32:dtype=float32"]
_CHECKED_TEXT = ROOT / "docs" / "architecture.md"
_NUM_CHECKED_PROMPTS = 8
_CHECKED_PROMPT_TOKENS = 64
_NUM_CHECKED_TOKENS = 16
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def main() -> int:
    """Install, check, measure, print, plot and write; return 1 if nothing could be measured."""
    args = _parse()
    # Paused processes would stay for ever if this one ended without closing them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    flags = cpu_flags()
    try:
        who = chosen([*map(naiad, args.naiad), *peers(flags)], args.contestants)
        model_dir = resolve_model(args.model)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shapes = REHEARSAL if args.rehearse else QUICK if args.quick else LONG
    if args.quick or args.rehearse:
        who = [each for each in who if not each.group.endswith("u8 KV") or args.contestants]
    arena = Arena(model_dir, args.threads, shapes, args.pip_args)
    who = arena.install([REFERENCE, *who])[1:] if REFERENCE.name not in arena.failures else []
    if args.install_only or not who:
        _print_failures(arena)
        return 1 if arena.failures and not who else 0
    return _measure(arena, who, shapes, model_dir, args)


def _measure(
    arena: Arena, who: list[Contestant], shapes: Sequence[Shape], model_dir: Path, args: argparse.Namespace
) -> int:
    prompts = checked_prompts(model_dir)
    expected = arena.generate(REFERENCE, prompts, _NUM_CHECKED_TOKENS)
    if expected is None:
        print("error: without transformers' tokens in float32 no speed is reported", file=sys.stderr)
        return 1
    shares = arena.check(who, prompts, expected)
    config = ModelConfig.from_directory(str(model_dir))
    footprints = sorted({weight_bytes(config, each) for each in who})
    bandwidths = _bandwidths(footprints, args.threads, {})
    turns: dict[Shape, dict[str, list[Turn]]] = {}
    with arena.all_started(who):
        for shape in shapes:
            turns[shape] = arena.take_turns(shape, args.rounds)
        memory = arena.memory()
    bandwidths = _bandwidths(footprints, args.threads, bandwidths)
    bounds = {
        (each.name, shape): step_bytes(config, each, shape) / bandwidths[weight_bytes(config, each)]
        for each in who
        for shape in shapes
    }
    rows = summarize(turns, who, bounds)
    if not rows:
        _print_failures(arena)
        return 1
    _print_all(rows, who, arena, memory)
    if not args.rehearse:
        settings = vars(args) | {
            "model": model_dir.name,
            "instruction_sets": [flag for flag in _CPU_FLAGS if flag in cpu_flags()],
            "read_bytes_per_s": {str(size): round(speed) for size, speed in bandwidths.items()},
            "versions": arena.versions,
            "agreement": shares,
            "start_to_first_token_s": arena.starts,
            "memory": memory,
            "left_out": arena.failures,
        }
        print("plot:", _plot(turns, rows), "written:", write_report("peers", settings, rows))
    return 0


def chosen(who: Sequence[Contestant], names: str) -> list[Contestant]:
    """The contestants whose names begin with one of the listed ones; all for "".

    Raises:
        StartupError: nobody has such a name.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        if not any(each.name.startswith(name) for each in who):
            known = ", ".join(each.name for each in who)
            raise StartupError(f"--contestants {name}: nobody has that name; there are {known}")
    return [each for each in who if not listed or each.name.startswith(tuple(listed))]


def checked_prompts(model_dir: Path) -> Prompts:
    """Prompts of plain English, whose next tokens are seldom near ties."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode(_CHECKED_TEXT.read_text(), add_special_tokens=False).ids
    starts = range(0, _NUM_CHECKED_PROMPTS * _CHECKED_PROMPT_TOKENS, _CHECKED_PROMPT_TOKENS)
    return [ids[start : start + _CHECKED_PROMPT_TOKENS] for start in starts]


def cpu_flags() -> list[str]:
    """The CPU's instruction sets as in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.partition(":")[2].split()
    return []


def _bandwidths(footprints: Sequence[int], threads: int, before: Mapping[int, float]) -> dict[int, float]:
    """The bandwidth for each footprint; the better of this and an earlier measurement."""
    return {size: max(read_bytes_per_s(size, threads), before.get(size, 0.0)) for size in footprints}


def _print_all(
    rows: list[Row], who: Sequence[Contestant], arena: Arena, memory: Mapping[str, Mapping[str, float]]
) -> None:
    print_rows(rows)
    print()
    print_rows(
        [
            {"contestant": each.name, "start_to_first_token_s": arena.starts[each.name], **memory[each.name]}
            for each in who
            if each.name in memory
        ]
    )
    _print_failures(arena)


def _print_failures(arena: Arena) -> None:
    for name, reason in arena.failures.items():
        print(f"left out: {name}: {reason}")


def _plot(turns: Mapping[Shape, object], rows: Sequence[Row]) -> str:
    shapes = {shape.name: shape for shape in turns if shape.kind == "decode"}
    return save_panels(
        "peers",
        "Decode, 128 + 128 tokens",
        [
            Panel("batch", "tokens/s", _lines(rows, shapes, "tokens_per_s")),
            Panel(
                "batch", "share of the memory bound", _lines(rows, shapes, "of_memory_bound"), ("bound", 1.0)
            ),
        ],
    )


def _lines(rows: Sequence[Row], shapes: Mapping[str, Shape], figure: str) -> dict[str, Line]:
    points: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["shape"] in shapes and row[figure] is not None:
            x, y = points.setdefault(row["contestant"], ([], []))
            x.append(shapes[row["shape"]].batch)
            y.append(row[figure])
    return dict(points)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--quick", action="store_true", help="no long contexts and no 8-bit KV caches")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes; no report is written")
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--contestants", default="", metavar="NAME,…", help="beginnings of names")
    parser.add_argument(
        "--naiad",
        action="append",
        metavar="NAME:field=value,…",
        help=f"a contestant with these fields of EngineConfig; repeatable (default: {', '.join(_NAIAD)})",
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N", help="medians are reported")
    parser.add_argument("--threads", type=at_least(1), default=num_compute_threads(), metavar="N")
    parser.add_argument("--pip-args", default="", metavar="OPTIONS", help="further options of pip")
    args = parser.parse_args()
    args.naiad = args.naiad or _NAIAD
    return args


if __name__ == "__main__":
    sys.exit(main())
