"""A strict reader of Prometheus' text format."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)")
_EACH_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"')
_KINDS = ("counter", "gauge", "histogram")

Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """A family: its kind, and the values of its samples by name and labels."""

    kind: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


@dataclass
class Scrape:
    """A page that has been read."""

    families: dict[str, Family]

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample that has these labels and perhaps others."""
        (found,) = self.values(name, **labels)
        return found

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of all samples that have these labels and perhaps others."""
        return [
            value
            for family in self.families.values()
            for (each, its), value in family.samples.items()
            if each == name and labels.items() <= dict(its).items()
        ]


def read_page(text: str) -> Scrape:
    """Read a page; anything that the format does not allow fails."""
    families: dict[str, Family] = {}
    name, described = "", ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if found := re.fullmatch(rf"# HELP ({_NAME}) .*", line):
            described = found[1]
            assert described not in families, f"{described} is on the page twice"
        elif found := re.fullmatch(rf"# TYPE ({_NAME}) (\w+)", line):
            name, kind = found[1], found[2]
            assert (name, kind in _KINDS) == (described, True), line
            families[name] = Family(kind)
        else:
            _read_sample(line, name, families)
    for each, family in families.items():
        if family.kind == "histogram":
            _check_histogram(each, family)
    return Scrape(families)


def _read_sample(line: str, family: str, families: dict[str, Family]) -> None:
    found = _SAMPLE.fullmatch(line)
    assert found, line
    suffixes = ("_bucket", "_sum", "_count") if families[family].kind == "histogram" else ("",)
    assert found[1] in [family + suffix for suffix in suffixes], f"{line} stands below {family}"
    pairs = _EACH_LABEL.findall(found[2] or "")
    assert len(dict(pairs)) == len(pairs), f"{line} has a label twice"
    key = found[1], frozenset(pairs)
    assert key not in families[family].samples, f"{line} is on the page twice"
    families[family].samples[key] = float(found[3])


def _check_histogram(name: str, family: Family) -> None:
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    for (each, labels), value in family.samples.items():
        if each == f"{name}_bucket":
            rest = frozenset(pair for pair in labels if pair[0] != "le")
            buckets.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    for labels, pairs in buckets.items():
        bounds, totals = zip(*pairs, strict=True)
        assert list(bounds) == sorted(set(bounds))
        assert bounds[-1] == math.inf
        assert list(totals) == sorted(totals)
        assert family.samples[f"{name}_count", labels] == totals[-1]
        assert (f"{name}_sum", labels) in family.samples
