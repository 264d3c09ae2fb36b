"""Measures the kernels on a GPU: speed, share of the hardware's speed, other implementations, and targets.

    python -m perf.kernels.bench
    python -m perf.kernels.bench --rehearse

Shapes are those of Llama-3-8B. Shares are relative to the copy bandwidth and the speed of a matrix product,
which are measured in the same run. An op is checked against its reference before it is timed; a rival that
computes the same is checked against the op. The cache is overwritten before each timed call; `queued_us`
is the time per call of back-to-back calls. `slower` is a rival's time divided by the op's. `--rehearse`
runs everything on a CPU with tiny shapes, without verdicts and reports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from perf.common.report import print_rows, write_report
from perf.kernels.attention import attention_cases
from perf.kernels.cases import Case, Rival, Run, assert_agrees
from perf.kernels.ceilings import Ceilings, measure_ceilings
from perf.kernels.clock import Clock
from perf.kernels.elements import element_cases
from perf.kernels.products import product_cases
from perf.kernels.sampling import sampling_cases
from perf.kernels.sizes import LLAMA_3_8B, TINY, Sizes
from perf.kernels.targets import verdict

from naiad.cli.argument_types import at_least

FAMILIES: dict[str, Callable[[Sizes, torch.device], Iterator[Case]]] = {
    "attention": attention_cases,
    "elements": element_cases,
    "products": product_cases,
    "sampling": sampling_cases,
}
_NOT_INSTALLED, _NO_MEMORY, _FAILED = "not installed", "out of memory", "failed"
_PACKAGES = ("triton", "flashinfer-python", "flash-attn")

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write the results; return 1 without a GPU."""
    args = _parse()
    if not args.rehearse and not torch.cuda.is_available():
        print("error: PyTorch finds no CUDA device; --rehearse runs tiny shapes on a CPU", file=sys.stderr)
        return 1
    device = torch.device("cpu" if args.rehearse else "cuda")
    sizes = TINY if args.rehearse else LLAMA_3_8B
    clock = Clock(device, args.repeats)
    torch.manual_seed(0)
    with torch.inference_mode():
        ceilings = measure_ceilings(sizes, device, clock)
        print(
            f"copy {ceilings.bytes_per_s / 1e12:.3f} TB/s, product {ceilings.flops_per_s / 1e12:.1f} TFLOP/s"
        )
        rows = []
        for name in args.families.split(","):
            cases = FAMILIES[name](sizes, device)
            rows += measure_family(cases, clock, ceilings, not args.rehearse, args.without)
    if args.rehearse:
        return 0
    met, missed = (sum(row["target"].startswith(word) for row in rows) for word in ("met", "missed"))
    print(f"targets: {met} met, {missed} missed")
    settings = vars(args) | ceilings.settings() | {name: _version(name) for name in _PACKAGES}
    print("written:", write_report("kernels", settings, rows))
    return 0


def measure_family(
    cases: Iterator[Case], clock: Clock, ceilings: Ceilings, judges: bool, without: Collection[str] = ()
) -> list[Row]:
    """Time all cases and print them: each op's time at once, and the table in the end.

    Args:
        cases: the cases; only one is held in memory at a time.
        clock: times calls on their device.
        ceilings: the hardware speeds to which shares are relative.
        judges: whether rows are compared with targets.
        without: names of rivals that are left out.
    """
    rows: list[Row] = []
    for case in cases:
        case = replace(case, rivals={name: each for name, each in case.rivals.items() if name not in without})
        made = measure_case(case, clock, ceilings, judges)
        print(f"{case.op}, {case.shape}: {made[0]['us']:.1f} us", file=sys.stderr, flush=True)
        rows += made
        # The next case may need its memory.
        del case
    if rows:
        print_rows([{name: _cell(name, value) for name, value in row.items()} for row in rows])
    return rows


def measure_case(case: Case, clock: Clock, ceilings: Ceilings, judges: bool) -> list[Row]:
    """Return a row for the op and one for each rival.

    Raises:
        WrongResultError: the result of the op or of a rival is wrong.
    """
    made = case.run()
    case.check(made)
    made = made.clone()
    ours = _timed_row(case, "naiad", case.run, clock, ceilings)
    rivals = [_rival_row(case, name, rival, made, clock, ceilings) for name, rival in case.rivals.items()]
    for row in rivals:
        row["slower"] = row["us"] / ours["us"] if row["us"] else None
        if row["who"] == "cuBLAS":
            ours["of_cublas"] = row["slower"]
    if judges:
        ours["target"] = verdict(case.target, ours)
    return [ours, *rivals]


def _rival_row(
    case: Case, name: str, rival: Rival, made: torch.Tensor, clock: Clock, ceilings: Ceilings
) -> Row:
    if rival.run is None:
        return _row(case, name, note=_NOT_INSTALLED)
    try:
        if rival.computes_the_same:
            assert_agrees(f"{name}, {case.op} {case.shape}", rival.run().reshape(made.shape), made)
        return _timed_row(case, name, rival.run, clock, ceilings)
    except torch.OutOfMemoryError:
        return _row(case, name, note=_NO_MEMORY)
    except RuntimeError as error:
        # Such as what torch.compile raises: the other rows are worth having.
        print(f"{name}, {case.op} {case.shape}: {error}", file=sys.stderr)
        return _row(case, name, note=_FAILED)


def _timed_row(case: Case, who: str, run: Run, clock: Clock, ceilings: Ceilings) -> Row:
    sample = clock.time(run)
    seconds = sample.median_s
    row = _row(case, who)
    row |= {"us": 1e6 * seconds, "spread": sample.spread, "queued_us": 1e6 * sample.queued_s}
    if case.num_bytes:
        row["tb_per_s"] = case.num_bytes / seconds / 1e12
        row["of_copy"] = case.num_bytes / seconds / ceilings.bytes_per_s
    if case.flops:
        row["tflops_per_s"] = case.flops / seconds / 1e12
        row["of_product"] = case.flops / seconds / ceilings.flops_per_s
    if case.logits_bytes:
        row["logits_passes"] = seconds * ceilings.bytes_per_s / case.logits_bytes
    return row


def _row(case: Case, who: str, note: str = "") -> Row:
    figures = (
        *("us", "spread", "queued_us", "tb_per_s", "of_copy", "tflops_per_s", "of_product"),
        *("logits_passes", "of_cublas", "slower"),
    )
    return {
        "op": case.op,
        "shape": case.shape,
        "who": who,
        **dict.fromkeys(figures),
        "target": "",
        "note": note,
    }


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if name in ("us", "queued_us", "tflops_per_s") else f"{value:.2f}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="NAME,…", help="%(default)s")
    parser.add_argument(
        "--without", action="append", default=[], metavar="RIVAL", help="a rival that is left out; repeatable"
    )
    parser.add_argument(
        "--repeats", type=at_least(2), default=100, metavar="N", help="maximum number of calls"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
