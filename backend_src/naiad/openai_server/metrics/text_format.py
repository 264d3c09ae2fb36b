"""Metrics in Prometheus' text format, version 0.0.4: families that count, and the page that they make."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge"]
_Key = tuple[tuple[str, str], ...]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? \S+( -?\d+)?")
_SUFFIXES = ("_bucket", "_sum", "_count")


class Family(Protocol):
    """A family of metrics."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def description(self) -> str:
        """What it measures."""

    @property
    def kind(self) -> str:
        """Its type in Prometheus' words."""

    def samples(self) -> list[str]:
        """A line for each sample."""


@dataclass(frozen=True, slots=True)
class Values:
    """Counters or gauges of one family, told apart by their labels."""

    name: str
    description: str
    kind: Kind
    _values: dict[_Key, float] = field(default_factory=dict)

    def add(self, labels: Mapping[str, str], amount: float = 1) -> None:
        """Add to the value with these labels, which is 0 at first."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, labels: Mapping[str, str], value: float) -> None:
        """Set the value with these labels."""
        self._values[tuple(labels.items())] = value

    def samples(self) -> list[str]:
        """A line for each value."""
        return [_line(self.name, key, value) for key, value in self._values.items()]


@dataclass(slots=True)
class _Counts:
    """Observations: their number in each bucket, the infinite one too, and their sum."""

    in_bucket: list[int]
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms of one family, told apart by their labels.

    Attributes:
        name, description: of the family.
        buckets: the ascending upper bounds, without the infinite one.
    """

    name: str
    description: str
    buckets: Sequence[float]
    _counts: dict[_Key, _Counts] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its type in Prometheus' words."""
        return "histogram"

    def observe(self, labels: Mapping[str, str], value: float, times: int = 1) -> None:
        """Count a value; `times` 0 only makes the histogram, without observations."""
        counts = self._counts.setdefault(tuple(labels.items()), _Counts([0] * (len(self.buckets) + 1)))
        counts.in_bucket[bisect_left(self.buckets, value)] += times
        counts.sum += value * times

    def samples(self) -> list[str]:
        """The lines of all histograms."""
        lines = []
        bounds = [*map(_number, self.buckets), "+Inf"]
        for key, counts in self._counts.items():
            totals = list(accumulate(counts.in_bucket))
            for bound, total in zip(bounds, totals, strict=True):
                lines.append(_line(f"{self.name}_bucket", (*key, ("le", bound)), total))
            lines.append(_line(f"{self.name}_sum", key, counts.sum))
            lines.append(_line(f"{self.name}_count", key, totals[-1]))
        return lines


@dataclass(slots=True)
class _Section:
    """A family on the page: its first lines, and those of its samples."""

    description: str
    kind: str
    samples: list[str] = field(default_factory=list)


class Page:
    """A page of families, each of them in one piece."""

    def __init__(self) -> None:
        """Start empty."""
        self._sections: dict[str, _Section] = {}

    def add(self, family: Family) -> None:
        """Add samples; if the page has the family, its description stays."""
        section = self._section(family.name, family.description, family.kind)
        section.samples += family.samples()

    def add_text(self, text: str, prefixes: tuple[str, ...], without: str | None) -> None:
        """Add families of another page. Lines that are no samples are dropped.

        Args:
            text: the page.
            prefixes: how the names of the families begin.
            without: samples with this label, written as `name="value"`, are left out; None: all stay.
        """
        descriptions: dict[str, str] = {}
        name = ""
        for line in text.splitlines():
            words = line.split(" ", 3)
            if line.startswith("# HELP ") and len(words) > 3:
                descriptions[words[2]] = words[3]
            elif line.startswith("# TYPE ") and len(words) > 3:
                name = words[2]
                if name.startswith(prefixes):
                    self._section(name, descriptions.get(name, ""), words[3])
            elif (
                name in self._sections
                and (without is None or without not in line)
                and _belongs(line, name, self._sections[name].kind)
            ):
                self._sections[name].samples.append(line)

    def text(self) -> str:
        """The page; families without samples are left out."""
        lines = []
        for name, section in self._sections.items():
            if section.samples:
                lines.append(f"# HELP {name} {section.description}")
                lines.append(f"# TYPE {name} {section.kind}")
                lines += section.samples
        return "".join(f"{line}\n" for line in lines)

    def _section(self, name: str, description: str, kind: str) -> _Section:
        return self._sections.setdefault(name, _Section(description, kind))


def _belongs(line: str, family: str, kind: str) -> bool:
    """Whether a line is a sample of this family."""
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return False
    names: Iterable[str] = (family,)
    if kind == "histogram":
        names = (family + suffix for suffix in _SUFFIXES)
    return found[1] in names


def _line(name: str, labels: _Key, value: float) -> str:
    inner = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels)
    return f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)
