"""Serves mixed requests for hours, disturbs the server meanwhile, and sees what is wrong or grows.

    python -m perf.server.soak --hours 1.5
    python -m perf.server.soak --hours 1.5 --earlier perf/results/*-soak.json
    python -m perf.server.soak --only-earlier --earlier perf/results/*-soak.json
    python -m perf.server.soak --hours 0.3 --inject leak

Requests come by every door: greedy and drawn, with JSON schemas and patterns, in one piece and streamed. Each
was answered alone first, and every later answer must be the same, or its beginning if its client left or its
deadline passed. In turns the engine, the OpenAI server, the gate and a model's process are killed and `llm`
is reloaded, under load; only requests that a kill cuts off may fail. Before each the load stops: nothing may
run or hold blocks then, and the server must have counted what its clients have heard. Memory is the anonymous
memory of every process; its slope leaves out the first minutes of each. With `--first-every-min` each kind of
kill happens once while the processes warm up. Descriptors and shared memory may not rise after these. The KV
cache and what drafts keep of ended outputs are small, so that both are full by then: they take memory only as
they fill. `--inject` gives the `llm` model a fault, which must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.server.serve_process import naiad_serve
from perf.server.soak.faults import FAULTS, LEAK, write_repository
from perf.server.soak.memory import (
    Lives,
    Slope,
    kept_descriptors,
    kept_shared_mb,
    minutes_of,
    slope_of,
    slope_rows,
    total_slope,
)
from perf.server.soak.pieces import Piece, read_piece
from perf.server.soak.questions import Door
from perf.server.soak.run import Soak

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import NaiadError

_MAX_TOLD = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print, plot and write; return 1 on a fault, or if memory surely grows or was not seen."""
    args = _parse(argv)
    pieces = [read_piece(path) for path in args.earlier]
    piece = Piece() if args.only_earlier else _run(args)
    for each in pieces:
        piece.add(each)
    if args.only_earlier:
        title = f"{piece.num['requests']} requests in {piece.hours:.1f} hours"
        print("plotted:", save_panels("soak-growth", title, [_growth(piece.minutes)]))
    slopes = {role: slope_of(lives) for role, lives in sorted(piece.minutes.items())}
    print_rows(slope_rows(slopes))
    print_rows([{"hours": round(piece.hours, 2), "disturbed": piece.disturbances.total(), **piece.num}])
    total = total_slope(slopes)
    if args.inject:
        leaks = "llm" in slopes and slopes["llm"].lower > args.max_mb_per_h
        is_found = leaks if args.inject == LEAK else piece.num_faults > 0
        print(f"the fault {args.inject} was {'found' if is_found else 'not found'}")
        return 0 if is_found else 1
    print(f"{piece.num_faults} faults; {_told_of_memory(total, args.max_mb_per_h)}")
    return 1 if piece.num_faults or not total.lower <= args.max_mb_per_h else 0


def _told_of_memory(total: Slope, limit: float) -> str:
    if math.isnan(total.upper):
        return "memory was not observed: no process ran for long enough after warming up"
    surely = "surely above" if total.lower > limit else "not yet shown to be below"
    told = "below" if total.upper < limit else surely
    return f"memory grows by at most {total.upper:.2f} MB/h (95 %), {told} the limit"


def _run(args: argparse.Namespace) -> Piece:
    """Soak, write and plot; print what was wrong."""
    soak = _soaked(args)
    piece = _piece_of(soak, args)
    name = f"soak-{args.inject}" if args.inject else "soak"
    print("written:", write_report(name, _settings(args), list(piece.rows())))
    _plot(name, soak, piece)
    for fault in soak.judge.faults[:_MAX_TOLD]:
        print("wrong:", fault)
    return piece


def _soaked(args: argparse.Namespace) -> Soak:
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as name:
        repository, key_file = Path(name) / "repository", Path(name) / "key"
        own = [] if args.cpu_threads is None else ["--cpu-threads", str(args.cpu_threads)]
        own += ["--kv-cache-bytes", str(args.kv_cache_bytes)]
        own += ["--max-shared-draft-tokens", str(args.max_shared_draft_tokens)]
        model = ["--model", str(resolve_model(args.model)), *own]
        environment = write_repository(repository, model, args.inject)
        options = ["--model-repository", str(repository), "--gate", "on"]
        options += ["--model-control-mode", "explicit", "--model-control-key", str(key_file)]
        with naiad_serve(options, environment, args.server_log) as server:
            soak = Soak(server, repository, key_file.read_text(encoding="ascii").strip(), args)
            try:
                asyncio.run(soak.run())
            except NaiadError as error:
                soak.judge.tell(f"the soak ended early: {error}")
                print("the last lines of the server:", *server.last_lines, sep="\n", end="", flush=True)
    warm_up_s = 60 * args.warm_up_min
    for fault in (
        *kept_descriptors(soak.samples, warm_up_s),
        *kept_shared_mb(soak.shared_mb, warm_up_s),
    ):
        soak.judge.tell(fault)
    return soak


def _piece_of(soak: Soak, args: argparse.Namespace) -> Piece:
    kinds = Counter(each.kind for each in soak.disturbances)
    minutes = minutes_of(soak.samples, 60 * args.warm_up_min)
    return Piece(soak.now_s / 3600, soak.judge.num, len(soak.judge.faults), minutes, kinds)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    shown = {"earlier": [path.name for path in args.earlier], "model": resolve_model(args.model).name}
    settings = vars(args) | shown
    del settings["server_log"]
    return settings


def _growth(minutes: Mapping[str, Lives]) -> Panel:
    """What each process has grown by since it was warm; the lives of a role are apart from each other."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for role, lives in sorted(minutes.items()):
        hours, megabytes = lines.setdefault(role, ([], []))
        for life in lives:
            hours += [*(at for at, _ in life), math.nan]
            megabytes += [*(mb - life[0][1] for _, mb in life), math.nan]
    return Panel("hours", "grown since it was warm, MB", lines)


def _plot(name: str, soak: Soak, piece: Piece) -> None:
    roles = sorted({each.role for each in soak.samples})
    panels = []
    for label, value in (("anonymous memory, MB", "anonymous_mb"), ("descriptors", "num_descriptors")):
        lines = {
            role: (
                [each.at_s / 3600 for each in soak.samples if each.role == role],
                [float(getattr(each, value)) for each in soak.samples if each.role == role],
            )
            for role in roles
        }
        panels.append(Panel("hours", label, lines))
    shared = {"/dev/shm": ([at for at, _ in soak.shared_mb], [mb for _, mb in soak.shared_mb])}
    panels.append(Panel("hours", "shared memory, MB", shared))
    panels.append(_growth(piece.minutes))
    title = f"{soak.judge.num['requests']} requests, {len(soak.disturbances)} kills and reloads"
    print("plotted:", save_panels(name, title, panels))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--hours", type=float, default=1.5, metavar="H", help="length of the run")
    add("--rate", type=float, default=3.0, metavar="N", help="requests a second")
    add("--server-log", type=Path, metavar="FILE", help="where to write the lines of the server")
    add("--questions", type=at_least(len(Door)), default=240, metavar="N", help="different requests")
    add("--every-min", type=float, default=15.0, metavar="M", help="minutes between kills and reloads")
    add("--first-every-min", type=float, metavar="M", help="of the first round (default: --every-min)")
    add("--undisturbed", action="store_true", help="kill and reload nothing")
    add("--warm-up-min", type=float, default=5.0, metavar="M", help="of each process, not in the slope")
    add("--max-mb-per-h", type=float, default=1.0, metavar="MB", help="limit of the slope")
    add("--cpu-threads", type=at_least(1), metavar="N", help="of the engine (default: as it chooses)")
    add("--kv-cache-bytes", type=at_least(1), default=256 << 20, metavar="N", help="of the engine")
    add("--max-shared-draft-tokens", type=at_least(0), default=4096, metavar="N", help="of the engine")
    add("--seed", type=int, default=1, metavar="N", help="of the load")
    add("--earlier", type=Path, nargs="*", default=[], metavar="FILE", help="reports of earlier runs to add")
    add("--only-earlier", action="store_true", help="add up the reports of earlier runs, and run nothing")
    add("--inject", choices=FAULTS, help="give the model a fault, and return 0 if it was found")
    args = parser.parse_args(argv)
    if args.first_every_min is None:
        args.first_every_min = args.every_min
    if args.only_earlier and not args.earlier:
        parser.error("--only-earlier: expected reports with --earlier")
    return args


if __name__ == "__main__":
    sys.exit(main())
