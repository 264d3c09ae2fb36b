"""`naiad report`: what each tenant has used, from a file of `naiad serve --usage-file`."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from naiad.cli.argument_types import above_0
from naiad.errors import ConfigError, StartupError
from naiad.openai_server.access.key_file import read_key_file
from naiad.snapshot import tenant_label
from naiad.usage import COUNTED, TenantUsage, UsageLine

_NOBODY = "(no tenant)"
_MAX_LINE_BYTES = 1 << 20
_COLUMNS = ("step s", "share", "KV block s", "prompt", "cached", "output", "draft")


@dataclass(frozen=True, slots=True)
class Row:
    """What one tenant has used of one model.

    Attributes:
        model: its served name.
        tenant: the tenant's name, or its label where no key has the name.
        usage: what was used.
        share: fraction of all step time, 0 to 1.
        cost: its share of the price; None without a price.
    """

    model: str
    tenant: str
    usage: TenantUsage
    share: float
    cost: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="what `naiad serve --usage-file` has written")
    when = "ISO 8601, such as 2026-11-24 or 2026-11-24T08:00:00+01:00; without an offset it is local time"
    add(
        "--from",
        dest="begin_s",
        type=_time,
        default=-math.inf,
        metavar="TIME",
        help=f"from this time on, {when}",
    )
    add("--to", dest="end_s", type=_time, default=math.inf, metavar="TIME", help="the last time")
    add("--api-keys", type=Path, metavar="FILE", help="the file of keys, which has the tenants' names")
    add(
        "--price-per-hour",
        type=above_0,
        metavar="P",
        help="of the machine, in any currency: the price of the whole time, idle or not, is divided by step "
        "time",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table, the largest share first.

    Raises:
        ConfigError: the times are in the wrong order.
        StartupError: a file cannot be read; the message names the line.
    """
    if args.end_s <= args.begin_s:
        raise ConfigError("--to", _shown(args.end_s), f"a time after --from = {_shown(args.begin_s)}")
    names = (
        {tenant_label(key.tenant): key.tenant for key in read_key_file(args.api_keys)}
        if args.api_keys
        else {}
    )
    lines = list(_within(_read(args.file), args.begin_s, args.end_s))
    begin_s = args.begin_s if args.begin_s > -math.inf else min((line.begin_s for line in lines), default=0.0)
    end_s = args.end_s if args.end_s < math.inf else max((line.end_s for line in lines), default=0.0)
    price = None if args.price_per_hour is None else args.price_per_hour * (end_s - begin_s) / 3600
    rows = _rows(lines, names, price)
    if args.json:
        print(json.dumps({"from": begin_s, "to": end_s, "rows": [_object_of(row) for row in rows]}, indent=2))
    elif rows:
        print(f"{_shown(begin_s)} to {_shown(end_s)}\n")
        print(_table(rows))
    else:
        print("nothing was used")
    return 0


def _time(text: str) -> float:
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        expected = "a time in ISO 8601, such as 2026-11-24T08:00:00"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from None


def _shown(time_s: float) -> str:
    return dt.datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")


def _read(path: Path) -> Iterator[UsageLine]:
    decoder = msgspec.json.Decoder(UsageLine)
    try:
        with path.open("rb") as opened:
            # A device may have no lines, and no end.
            lines = iter(lambda: opened.readline(_MAX_LINE_BYTES), b"")
            for number, text in enumerate(lines, 1):
                try:
                    yield decoder.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise StartupError(f"{path}: line {number} is not one of a usage file: {error}") from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None


def _within(lines: Iterable[UsageLine], begin_s: float, end_s: float) -> Iterator[UsageLine]:
    """Yield the lines of these times; of a line that is partly inside, what belongs there by its time."""
    for line in lines:
        first_s, last_s = max(line.begin_s, begin_s), min(line.end_s, end_s)
        if line.begin_s >= end_s or line.end_s <= begin_s:
            continue
        if (first_s, last_s) == (line.begin_s, line.end_s):
            yield line
            continue
        fraction = (last_s - first_s) / (line.end_s - line.begin_s)
        parts = {name: _part(getattr(line, name), fraction) for name in COUNTED}
        yield msgspec.structs.replace(line, begin_s=first_s, end_s=last_s, **parts)


def _part(value: float, fraction: float) -> float:
    return round(value * fraction) if isinstance(value, int) else value * fraction


def _rows(lines: Iterable[UsageLine], names: Mapping[str, str], price: float | None) -> list[Row]:
    sums: dict[tuple[str, str], TenantUsage] = {}
    for line in lines:
        key = (line.model, line.tenant)
        sums[key] = sums.get(key, TenantUsage(line.tenant)).plus(line)
    step_s = sum(usage.step_s for usage in sums.values())
    rows = []
    for (model, label), usage in sums.items():
        share = usage.step_s / step_s if step_s else 0.0
        cost = None if price is None else price * share
        rows.append(Row(model, names.get(label, label) or _NOBODY, usage, share, cost))
    return sorted(rows, key=lambda row: -row.usage.step_s)


def _object_of(row: Row) -> dict[str, object]:
    counted = {name: getattr(row.usage, name) for name in COUNTED}
    return {"model": row.model, "tenant": row.tenant, **counted, "share": row.share, "cost": row.cost}


def _table(rows: Sequence[Row]) -> str:
    has_cost = rows[0].cost is not None
    lines = [["model", "tenant", *_COLUMNS, *(["cost"] if has_cost else [])]]
    for row in rows:
        usage = row.usage
        lines.append(
            [
                row.model,
                row.tenant,
                f"{usage.step_s:.2f}",
                f"{100 * row.share:.1f} %",
                f"{usage.block_s:.1f}",
                f"{usage.num_prompt_tokens}",
                f"{usage.num_cached_tokens}",
                f"{usage.num_output_tokens}",
                f"{usage.num_draft_tokens}",
                *([] if row.cost is None else [f"{row.cost:.4f}"]),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
