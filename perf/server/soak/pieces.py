"""Pieces of a soak, kept and put together: an hour and a half now, more another day."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.server.soak.memory import Lives

from naiad.errors import ConfigError

_ROUNDED = 4


@dataclass(slots=True)
class Piece:
    """What one or several runs have seen.

    Attributes:
        hours: how long they were.
        num: kind of end → how many requests had it.
        faults: what was wrong.
        minutes: role → for each process of it its memory (hours since the run began, megabytes).
        disturbances: kind → how many.
    """

    hours: float = 0.0
    num: Counter[str] = field(default_factory=Counter)
    num_faults: int = 0
    minutes: dict[str, Lives] = field(default_factory=lambda: defaultdict(list))
    disturbances: Counter[str] = field(default_factory=Counter)

    def add(self, other: Piece) -> None:
        """Add what another has seen."""
        self.hours += other.hours
        self.num += other.num
        self.num_faults += other.num_faults
        self.disturbances += other.disturbances
        for role, lives in other.minutes.items():
            self.minutes[role] += lives

    def rows(self) -> Iterable[dict[str, Any]]:
        """Everything as rows of a report; see `read_piece`."""
        yield {
            "hours": round(self.hours, _ROUNDED),
            "num": dict(self.num),
            "num_faults": self.num_faults,
            "disturbances": dict(self.disturbances),
        }
        for role, lives in self.minutes.items():
            for life in lives:
                points = " ".join(f"{x:.{_ROUNDED}f}:{y:.{_ROUNDED}f}" for x, y in life)
                yield {"memory of": role, "hour:MB": points}


def read_piece(path: Path) -> Piece:
    """Read a report that holds a piece.

    Raises:
        ConfigError: it is none.
    """
    try:
        rows: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        first = rows[0]
        piece = Piece(first["hours"], Counter(first["num"]), first["num_faults"])
        piece.disturbances.update(first["disturbances"])
        for row in rows[1:]:
            pairs = (point.split(":") for point in row["hour:MB"].split())
            piece.minutes[row["memory of"]].append([(float(x), float(y)) for x, y in pairs])
    except (OSError, ValueError, LookupError, TypeError) as error:
        expected = f"a report of perf.server.soak: {error}"
        raise ConfigError("--earlier", str(path), expected) from None
    return piece
