"""Compares Naiad on a CPU with vLLM, llama.cpp, OpenVINO GenAI and transformers, in turns, in one run.

    python -m perf.peers.bench --quick

Each engine runs in a process and an environment of its own, which is installed under build/peers at the
first run. All get the same token ids, threads and room for KV. Before anything is timed, each engine's greedy
tokens are compared with those of transformers in float32. Between its turns an engine's process is stopped.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.report import ROOT, print_rows, write_report
from perf.peers import markdown
from perf.peers.arena import SETTLE_S, Arena, Prompts
from perf.peers.bounds import BoundMeter, bound_meter
from perf.peers.contestants import REFERENCE, Contestant, exact, formats, naiad, peers
from perf.peers.plots import save_plots
from perf.peers.shapes import LONG, QUICK, REHEARSAL, Shape, need, weight_bytes
from perf.peers.summary import Row, Turn, summarize
from perf.peers.trace import replay
from perf.server.trace_part import read_part
from tokenizers import Tokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config.cores import num_compute_threads
from naiad.errors import StartupError
from naiad_kernels.native.variants import cpu_flags

_NAIAD = ["bf16:dtype=bfloat16", "f32:dtype=float32", "int8:dtype=bfloat16,quantization=int8"]
_CHECKED_TEXT = ROOT / "docs" / "architecture.md"
_NUM_CHECKED_PROMPTS = 8
_CHECKED_PROMPT_TOKENS = 64
_NUM_CHECKED_TOKENS = 16
KINDS = ("decode", "prefill", "context", "trace")
_QUICK_ROUNDS, _ROUNDS = 2, 3
# Requests of the trace in a round.
_QUICK_REQUESTS, _REQUESTS = 8, 64
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured.

    Attributes:
        rows: figures of the shapes.
        trace: figures of the trace.
        memory: name → kind of memory → MiB.
        shares: name → share of the first tokens that are float32's.
        products: name → the instruction of its compute bound.
    """

    rows: list[Row]
    trace: list[Row]
    memory: Mapping[str, Mapping[str, float]]
    shares: Mapping[str, float]
    products: Mapping[str, str]


def main() -> int:
    """Install, check, measure, print, plot and write; return 1 if nothing could be measured."""
    args = _parse()
    started_s = time.monotonic()
    # Paused processes would stay for ever if this one ended without closing them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        everyone = formats(cpu_flags()) if args.formats else [*map(naiad, args.naiad), *peers(cpu_flags())]
        who = chosen(everyone, args.contestants)
        kinds = chosen_kinds(args.kinds, args.quick)
        shapes = REHEARSAL if args.rehearse else QUICK if args.quick else LONG
        measured = chosen_shapes(shapes, kinds, args.batch_sizes)
        model_dir = resolve_model(args.model)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.quick or args.rehearse:
        who = [each for each in who if not each.group.endswith("u8 KV") or args.contestants]
    settle_s = 0.0 if args.rehearse else SETTLE_S
    arena = Arena(model_dir, args.threads, shapes, args.pip_args, settle_s)
    references = _references(who, args)
    arena.install([*references.values(), *who])
    who = [each for each in who if each.name not in arena.failures]
    if args.install_only or not who:
        _print_failures(arena)
        return 1 if arena.failures and not who else 0
    results = _measure(arena, who, references, measured, kinds, model_dir, args)
    if results is None or not (results.rows or results.trace):
        _print_failures(arena)
        return 1
    _print_all(results, who, arena)
    if not args.rehearse:
        plots = save_plots(results.rows, shapes, "formats" if args.formats else "peers")
        minutes = (time.monotonic() - started_s) / 60
        print("plots:", *plots, "written:", _write(results, arena, model_dir, minutes, args))
    return 0


def _measure(
    arena: Arena,
    who: list[Contestant],
    references: Mapping[str, Contestant],
    shapes: Sequence[Shape],
    kinds: Sequence[str],
    model_dir: Path,
    args: argparse.Namespace,
) -> Results | None:
    prompts = checked_prompts(model_dir)
    tokens: dict[Contestant, Prompts] = {}
    for reference in dict.fromkeys(references.values()):
        made = arena.generate(reference, prompts, _NUM_CHECKED_TOKENS)
        if made is None:
            print(f"error: without the tokens of {reference.name} no speed is reported", file=sys.stderr)
            return None
        tokens[reference] = made
    expected = {model_format: tokens[reference] for model_format, reference in references.items()}
    shares = arena.check(who, prompts, expected)
    footprints = {each: weight_bytes(arena.config, each) for each in who}
    try:
        with bound_meter(args.threads, max(footprints.values()), cpu_flags()) as meter:
            rows, trace, memory = _take_turns(arena, who, shapes, kinds, meter, args)
            products = {each.name: meter.products.product(each.product_bits).function for each in who}
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    return Results(rows, trace, memory, shares, products)


def _take_turns(
    arena: Arena,
    who: Sequence[Contestant],
    shapes: Sequence[Shape],
    kinds: Sequence[str],
    meter: BoundMeter,
    args: argparse.Namespace,
) -> tuple[list[Row], list[Row], dict[str, dict[str, float]]]:
    """Rows of the shapes, rows of the trace, and memory."""
    turns: dict[Shape, dict[str, list[Turn]]] = {}
    trace: list[Row] = []
    arena.time_starts(who, args.rounds)
    with arena.all_started(who):
        for shape in shapes:
            turns[shape] = arena.take_turns(
                shape,
                args.rounds,
                lambda each: meter.measure(weight_bytes(arena.config, each), each.product_bits),
            )
        # A contestant that fails at the trace keeps its figures.
        memory = arena.memory()
        if "trace" in kinds:
            requests = 2 if args.rehearse else _QUICK_REQUESTS if args.quick else _REQUESTS
            part = read_part(args.rounds * requests, arena.config.vocab_size, arena.max_length)
            trace = replay(arena, part, args.rounds)
        memory |= arena.memory()
    needs = {(each.name, shape): need(arena.config, each, shape) for each in who for shape in shapes}
    return summarize(turns, who, needs), trace, memory


def _write(results: Results, arena: Arena, model_dir: Path, minutes: float, args: argparse.Namespace) -> Path:
    flags = cpu_flags()
    settings: dict[str, Any] = vars(args) | {
        "model": model_dir.name,
        "instruction_sets": [flag for flag in _CPU_FLAGS if flag in flags],
        "products": results.products,
        "versions": arena.versions,
        "agreement": results.shares,
        "start_to_first_token_s": arena.starts,
        "memory": results.memory,
        "trace": results.trace,
        "left_out": arena.failures,
        "minutes": round(minutes, 1),
    }
    return write_report("formats" if args.formats else "peers", settings, results.rows)


def _references(who: Sequence[Contestant], args: argparse.Namespace) -> dict[str, Contestant]:
    """Who generates the expected tokens of each model format: with quantised weights, or the checkpoint's."""
    return {each.model_format: exact(each.model_format) if args.formats else REFERENCE for each in who}


def chosen_kinds(names: str, is_quick: bool) -> list[str]:
    """The kinds of work that are measured; "" stands for all, without "context" in a quick run.

    Raises:
        StartupError: there is no such kind, or the quick run does not have it.
    """
    known = [kind for kind in KINDS if kind != "context" or not is_quick]
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        if name not in known:
            raise StartupError(f"--kinds {name}: expected some of {', '.join(known)}")
    return listed or known


def chosen(who: Sequence[Contestant], names: str) -> list[Contestant]:
    """The contestants that are listed by their names or beginnings of names; all for "".

    A whole name stands for nobody else: "openvino int8" leaves out "openvino int8 kv8".

    Raises:
        StartupError: nobody has such a name.
    """
    known = [each.name for each in who]
    listed = [name.strip() for name in names.split(",") if name.strip()]
    found: set[str] = set()
    for name in listed:
        meant = [name] if name in known else [each for each in known if each.startswith(name)]
        if not meant:
            raise StartupError(f"--contestants {name}: nobody has that name; there are {', '.join(known)}")
        found.update(meant)
    return [each for each in who if not listed or each.name in found]


def chosen_shapes(
    shapes: Sequence[Shape], kinds: Collection[str], batch_sizes: Collection[int]
) -> list[Shape]:
    """The shapes of these kinds with these batch sizes; an empty collection of sizes stands for all.

    Raises:
        StartupError: no such shape has one of the sizes.
    """
    known = {each.batch for each in shapes if each.kind in kinds}
    unknown = set(batch_sizes) - known
    if unknown:
        allowed = (
            f"some of {', '.join(map(str, sorted(known)))}" if known else "none with these kinds of work"
        )
        raise StartupError(f"--batch-sizes {min(unknown)}: expected {allowed}")
    return [each for each in shapes if each.kind in kinds and (not batch_sizes or each.batch in batch_sizes)]


def checked_prompts(model_dir: Path) -> Prompts:
    """Prompts of plain English, whose next tokens are seldom near ties."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode(_CHECKED_TEXT.read_text(), add_special_tokens=False).ids
    starts = range(0, _NUM_CHECKED_PROMPTS * _CHECKED_PROMPT_TOKENS, _CHECKED_PROMPT_TOKENS)
    return [ids[start : start + _CHECKED_PROMPT_TOKENS] for start in starts]


def _print_all(results: Results, who: Sequence[Contestant], arena: Arena) -> None:
    if results.rows:
        print_rows(results.rows)
        print(f"\n{markdown.speeds(results.rows)}\n\n{markdown.ratios(results.rows, who)}\n")
    start_s = {name: statistics.median(taken) for name, taken in arena.starts.items()}
    print(f"{markdown.starts(start_s, results.memory)}\n")
    print("compute bounds:", ", ".join(f"{name} {made}" for name, made in results.products.items()), "\n")
    if results.trace:
        others = [each for each in who if not each.serves and each.name not in arena.failures]
        print(f"{markdown.trace(results.trace, others)}\n")
    _print_failures(arena)


def _print_failures(arena: Arena) -> None:
    for name, reason in arena.failures.items():
        print(f"left out: {name}: {reason}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--quick", action="store_true", help="no long contexts and no 8-bit KV caches")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes; no report is written")
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--contestants", default="", metavar="NAME,…", help="names, or their beginnings")
    parser.add_argument(
        "--formats",
        action="store_true",
        help="compare engines that load the same quantised model",
    )
    parser.add_argument("--kinds", default="", metavar="KIND,…", help=f"some of {', '.join(KINDS)}")
    parser.add_argument(
        "--batch-sizes",
        type=at_least(1),
        nargs="+",
        default=[],
        metavar="N",
        help="leave shapes of other batch sizes out",
    )
    parser.add_argument(
        "--naiad",
        action="append",
        metavar="NAME:field=value,…",
        help=f"a contestant with these fields of EngineConfig; repeatable (default: {' '.join(_NAIAD)})",
    )
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        metavar="N",
        help=f"medians are reported (default: {_ROUNDS}, or {_QUICK_ROUNDS} with --quick)",
    )
    parser.add_argument("--threads", type=at_least(1), default=num_compute_threads(), metavar="N")
    parser.add_argument("--pip-args", default="", metavar="OPTIONS", help="further options of pip")
    args = parser.parse_args()
    args.naiad = args.naiad or _NAIAD
    args.rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    return args


if __name__ == "__main__":
    sys.exit(main())
