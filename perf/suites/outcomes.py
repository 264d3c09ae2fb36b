"""What became of a suite's tests, and why, as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.suites.reasons import Reason, reason_of

# The worst comes last: a test that passed may still fail when its fixtures end.
_ORDER = ("in process", "not run", "skipped", "passed", "failed", "not imported")
_COLUMNS = ("passed", "failed", "explained", "skipped", "not run", "in process")
# Lines of an unexplained failure that are shown.
_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test.

    Attributes:
        test: its id: file::class::function[parameters].
        outcome: one word of `_ORDER`.
        text: the failure.
    """

    test: str
    outcome: str
    text: str = ""

    @property
    def file(self) -> str:
        """Its file, without the folder `tests`."""
        return self.test.partition("::")[0].removeprefix("tests/")


class Outcomes:
    """What became of a suite's tests."""

    def __init__(self, outcomes: Sequence[Outcome], reasons: Sequence[Reason]) -> None:
        """Set up; failures that a reason explains are counted by it."""
        self._outcomes = outcomes
        self._reasons = reasons
        self.explained: Counter[str] = Counter()
        self.failures: list[Outcome] = []
        self._counts: dict[str, Counter[str]] = {}
        for each in outcomes:
            self._counts.setdefault(each.file, Counter())[self._column(each)] += 1

    def by_file(self) -> str:
        """A table with a row for each file."""
        rows = [
            [file, *(str(counts[column] or "") for column in _COLUMNS)]
            for file, counts in sorted(self._counts.items())
        ]
        total: Counter[str] = sum(self._counts.values(), Counter())
        rows.append(["all", *(str(total[column]) for column in _COLUMNS)])
        return _table(("file", *_COLUMNS), rows)

    def by_reason(self) -> str:
        """A table with a row for each reason that explains a failure or keeps a test from being run."""
        return _table(("tests", "why"), [[str(number), why] for why, number in self.explained.most_common()])

    def shown_failures(self) -> str:
        """The failures that nothing explains."""
        return "\n\n".join(
            f"{each.outcome}: {each.test}\n" + "\n".join(each.text.strip().splitlines()[-_SHOWN_LINES:])
            for each in self.failures
        )

    def _column(self, each: Outcome) -> str:
        if each.outcome == "not run":
            self.explained[next(reason.why for reason in self._reasons if reason.keeps_back(each.test))] += 1
        if each.outcome not in ("failed", "not imported"):
            return each.outcome
        reason = reason_of(self._reasons, each.test, each.text)
        if reason is None:
            self.failures.append(each)
            return "failed"
        self.explained[reason.why] += 1
        return "explained"


def read_record(path: Path) -> list[Outcome]:
    """Read what the plugin has written: the worst outcome of each test."""
    found: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        each = Outcome(**json.loads(line))
        before = found.get(each.test)
        if before is None or _ORDER.index(each.outcome) > _ORDER.index(before.outcome):
            found[each.test] = each
    return list(found.values())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
