"""Says what is wrong with an answer that a soak has heard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perf.server.processor_time import GATE, OPENAI
from perf.server.soak.memory import ENGINE
from perf.server.soak.questions import NO_END, Heard, Question

RELOAD, STUB = "reload", "text"
# In this order, again and again. The server is started anew when a stub has ended, and reloads soon after.
DISTURBANCES = (OPENAI, STUB, RELOAD, ENGINE, GATE)
_BROKE = ("the connection broke", "the call broke")
# Ends of requests whose deadline passes in the queue.
_LATE = ("timeout", "deadline")


@dataclass(slots=True)
class Disturbance:
    """Something was killed or reloaded.

    Attributes:
        kind: one of `DISTURBANCES`.
        began_s, ended_s: from then until every door answered again, in seconds since the soak began.
    """

    kind: str
    began_s: float
    ended_s: float = math.inf

    def excuses(self, trial: Trial) -> bool:
        """Whether a request may have failed by it, as it did."""
        if trial.ended_s < self.began_s or trial.began_s > self.ended_s or self.kind == RELOAD:
            return False
        if self.kind == ENGINE:
            # Its requests end with an error; nothing breaks off.
            return not trial.heard.error.startswith(_BROKE)
        return self.kind == STUB or (self.kind == OPENAI) == trial.question.door.is_openai


@dataclass(frozen=True, slots=True)
class Trial:
    """A question and what came of it.

    Attributes:
        began_s, ended_s: in seconds since the soak began.
        has_deadline: whether it had a deadline that may pass.
    """

    question: Question
    heard: Heard
    began_s: float
    ended_s: float
    has_deadline: bool = False


@dataclass(slots=True)
class Judge:
    """Compares every answer with what its question got alone.

    Attributes:
        disturbances: those so far; added to by the owner.
        expected: the answers alone, by the number of the question.
        num: kind of end → how many requests had it.
        faults: what was wrong.
    """

    disturbances: Sequence[Disturbance]
    expected: list[list[Any]] = field(default_factory=list)
    num: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def take(self, trial: Trial) -> None:
        """Judge a request that has ended."""
        heard, expected = trial.heard, self.expected[trial.question.number]
        is_whole = not (heard.error or heard.has_left or trial.has_deadline)
        self.num["requests"] += 1
        if heard.answer != expected if is_whole else not _begins(expected, heard):
            self.num["wrong"] += 1
            self._tell(trial, f"expected {expected}")
        elif heard.has_left:
            self.num["left"] += 1
        elif heard.error.startswith(NO_END) or heard.num_ends > 1 or not (heard.error or heard.num_ends):
            # No kill and no deadline excuses these: whatever is cut off ends with an error, once.
            self.num["ends lost"] += 1
            self._tell(trial, f"{heard.num_ends} ends")
        elif heard.error:
            self._take_failed(trial)
        else:
            self.num["late" if heard.answer != expected else "whole"] += 1

    def tell(self, fault: str) -> None:
        """Add a fault that is no single request's."""
        self.faults.append(fault)

    def _take_failed(self, trial: Trial) -> None:
        if trial.has_deadline and any(word in trial.heard.error for word in _LATE):
            self.num["late"] += 1
        elif any(each.excuses(trial) for each in self.disturbances):
            self.num["cut off"] += 1
        else:
            self.num["failed"] += 1
            self._tell(trial, "nothing explains it")

    def _tell(self, trial: Trial, fault: str) -> None:
        question = trial.question
        self.faults.append(
            f"question {question.number} by {question.door.name}, {trial.began_s:.1f} to {trial.ended_s:.1f} "
            f"s, {dict(question.asked)}: {trial.heard}: {fault}"
        )


def _begins(expected: Sequence[Any], heard: Heard) -> bool:
    """Whether each sequence, as far as it came, is the beginning of what is expected."""
    return all(
        expected[index][: len(part)] == part
        for index, part in zip(sorted(heard.pieces), heard.answer, strict=True)
    )
