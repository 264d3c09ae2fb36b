"""Decides how many draft tokens each sequence gets in a step: as many as pay for themselves."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from naiad.speculation.drafter import MAX_IN_STEP
from naiad.speculation.step_cost import StepCost

# Factor by which earlier results of a sequence lose weight with each window: about the last twenty count.
_MEMORY = 0.95
# The same with each step in which a draft model was not asked: after some hundred steps the record is
# almost forgotten.
_FADING = 0.996
# Up to so many rows and draft tokens are planned without NumPy: its calls take longer than the arithmetic.
_FEW = 64


@dataclass(slots=True)
class AcceptanceState:
    """How many of a sequence's recent drafts were accepted, and the time it may spend on a probe.

    Attributes:
        num_judged: number of draft tokens that the target judged, older ones with less weight. Each
            window counts its accepted tokens and the first rejected one. It starts at two.
        num_accepted: how many of them were accepted, with the same weights.
        credit_s: seconds of step time that may be spent on a probe.
        first_rate: what the estimate was at first, and becomes again if nothing is judged.
    """

    num_judged: float = 2.0
    num_accepted: float = 1.0
    credit_s: float = 0.0
    first_rate: float = 0.5

    @classmethod
    def starting_at(cls, rate: float) -> AcceptanceState:
        """The record of a sequence of which nothing is known, when those of others have this rate."""
        return cls(num_accepted=2.0 * rate, first_rate=rate)

    @property
    def rate(self) -> float:
        """The estimated probability that a draft token is accepted if the earlier ones are."""
        return self.num_accepted / self.num_judged

    def update(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Record one window's result; not to be called for a step without draft tokens."""
        assert 0 <= num_accepted_tokens <= num_draft_tokens > 0
        num_judged = min(num_accepted_tokens + 1, num_draft_tokens)
        self.num_judged = _MEMORY * self.num_judged + num_judged
        self.num_accepted = _MEMORY * self.num_accepted + num_accepted_tokens

    def fade(self) -> None:
        """Give the record a little less weight; to be called for a step without draft tokens."""
        self.num_judged = 2.0 + (self.num_judged - 2.0) * _FADING
        first = 2.0 * self.first_rate
        self.num_accepted = first + (self.num_accepted - first) * _FADING


class DraftRow(NamedTuple):
    """The inputs that decide one sequence's draft tokens in a step.

    Attributes:
        state: the record of its earlier drafts.
        num_most: maximum number of draft tokens: the length of a draft that exists already, else the
            limit for a draft model, or 0 if the sequence has no draft.
        num_unread: known tokens that the draft model has to read before its first pass for the
            sequence; −1: no model is needed, because the draft exists already.
        num_left: tokens that it may still generate, ≥ 1.
        num_context: its known tokens, to which each new token attends.
        is_drawn: whether its tokens are drawn instead of taken greedily, in its draft too.
    """

    state: AcceptanceState
    num_most: int
    num_unread: int = -1
    num_left: int = 1
    num_context: int = 0
    is_drawn: bool = False


class SpeculationPolicy:
    """Distributes a step's draft tokens so that the most tokens per second come out.

    Gain. If each draft token is accepted with probability a when the earlier ones are, the j-th adds
    a**j expected tokens, and k of them raise the one token of the step to
    E(k) = 1 + a + … + a**k = (1 − a**(k + 1)) / (1 − a) (Leviathan et al., arXiv 2211.17192).

    Cost. The duration of a step was measured by its number of tokens: it is flat while reading the
    weights is the bottleneck, and rises with each token when arithmetic is. A draft token costs what it
    adds to that curve after the other tokens of the step, what attention over its sequence's context
    adds, and what drawing a token adds if the sequence's tokens are drawn. Prompts in the same step only
    shift the position on the curve: their own cost is incurred in any case. If a model drafts, its j-th
    pass computes all rows that get j tokens or more, and passes were measured in the same way.

    Choice. The policy maximises (expected output tokens) / (seconds of the step without prompts +
    seconds added). For free drafters and equal contexts, the best way to distribute n draft tokens takes
    the n likeliest, so one pass over all tokens in order of a**j finds the maximum for every shape of
    the curve. A full batch, where a draft token costs as much as a certain one, gets none. A draft model
    reads a sequence's known tokens only if the sequence's remaining drafts can pay for that.

    Probes. A sequence without drafts would never show that it has become predictable. So each one saves
    a small share of its step time and gets one draft token when the savings pay for it. Where speculation
    does not pay, at most this share is lost, besides the loss before the first windows have shown it.
    Where a draft model would have to read everything since it was last asked, no share is enough. There
    the sequence's record fades instead, towards where it began.

    The policy is deterministic: nothing is random, and no clock is read.
    """

    def __init__(
        self, step_cost: StepCost, probe_share: float = 0.01, pass_cost: StepCost | None = None
    ) -> None:
        """Plan with the costs of one machine.

        Args:
            step_cost: the cost of the served model's steps, measured on this machine.
            probe_share: the share of a step's time that may be spent on sequences for which drafts
                do not pay, in [0, 1).
            pass_cost: the cost of the draft model's passes; None: no draft model, or its passes are free.
        """
        self._step_cost = step_cost
        self._probe_share = probe_share
        self._pass_cost = pass_cost

    def plan(self, rows: list[DraftRow], num_step_tokens: int, num_room: int = sys.maxsize) -> list[int]:
        """Return the number of draft tokens for each row of the next step.

        Args:
            rows: all sequences that get a new token in the step.
            num_step_tokens: the step's tokens without drafts: one per row, and prompts.
            num_room: draft tokens that the step has room for.

        Returns:
            For each row a number from 0 to `num_most`. The states' credits change.
        """
        assert num_step_tokens >= len(rows), "each row has a token in the step"
        assert num_room >= 0, "there is no less room than none"
        num_tokens = sum(row.num_most for row in rows)
        if num_tokens == 0:
            return [0] * len(rows)
        if self._pass_cost is None and len(rows) + num_tokens <= _FEW:
            return self._plan_few(rows, num_step_tokens, num_room)
        return self._plan_many(rows, num_step_tokens, num_room)

    def _plan_few(self, rows: list[DraftRow], num_step_tokens: int, num_room: int) -> list[int]:
        """What `plan` describes, if passes of a draft model cost nothing; one token after the other."""
        at = self._step_cost.at
        plain_s, tokens, probing_s = at(len(rows)), [], []
        for number, row in enumerate(rows):
            gain, rate, window_s = 1.0, row.state.rate, self._window_s(row, 1)
            plain_s += window_s
            probing_s.append(self._window_s(row, 2) - window_s)
            for place in range(1, row.num_most + 1):
                gain *= rate
                longer_s = self._window_s(row, place + 1)
                tokens.append((gain, number, longer_s - window_s))
                window_s = longer_s
        tokens.sort(key=lambda token: -token[0])
        outputs, windows_s, most, num_drafts = float(len(rows)), 0.0, len(rows) / plain_s, 0
        for place, (gain, _, token_s) in enumerate(tokens[:num_room], start=1):
            outputs += gain
            windows_s += token_s
            added_s = at(num_step_tokens + place) - at(num_step_tokens) + windows_s
            per_s = outputs / (plain_s + added_s)
            if per_s > most:
                most, num_drafts = per_s, place
        counts = [0] * len(rows)
        for _, number, _ in tokens[:num_drafts]:
            counts[number] += 1
        self._probe(rows, counts, num_step_tokens, plain_s, probing_s, num_room)
        return counts

    def _window_s(self, row: DraftRow, num_tokens: int) -> float:
        """Seconds that attention over a row's context, and drawing, add to its window of tokens."""
        drawn_s = self._step_cost.drawn_s * num_tokens if row.is_drawn else 0.0
        return self._step_cost.of_context_at(num_tokens, row.num_context) + drawn_s

    def _plan_many(self, rows: list[DraftRow], num_step_tokens: int, num_room: int) -> list[int]:
        """What `plan` describes, for any drafter and any number of rows and tokens."""
        num_places = max(row.num_most for row in rows)
        places = np.arange(1, num_places + 1)
        contexts = np.array([row.num_context for row in rows])
        windows_s = self._step_cost.of_context(np.arange(1, num_places + 2), contexts[:, None])
        is_drawn = np.array([row.is_drawn for row in rows])
        windows_s = windows_s + self._step_cost.drawn_s * is_drawn[:, None] * np.arange(1, num_places + 2)
        plain_s = float(self._step_cost(np.array(len(rows)))) + float(windows_s[:, 0].sum())
        reading_s = self._reading_s(rows)
        rates = np.array([row.state.rate for row in rows])
        most = np.array([row.num_most for row in rows])
        num_left = np.array([row.num_left for row in rows])
        if reading_s.any():
            saved_s = self._saved_s(rows, rates, most, plain_s, windows_s, num_step_tokens)
            most[(reading_s > 0) & (reading_s > num_left * saved_s)] = 0
        is_usable = (places <= most[:, None]).ravel()
        gains = (rates[:, None] ** places).ravel()[is_usable]
        row_numbers = np.repeat(np.arange(len(rows)), num_places)[is_usable]
        order = np.argsort(-gains, kind="stable")
        costs = self._step_cost(num_step_tokens + np.arange(gains.size + 1))
        outputs = len(rows) + np.concatenate(([0.0], np.cumsum(gains[order])))
        added_s = costs - costs[0]
        added_s[1:] += np.cumsum(np.diff(windows_s).ravel()[is_usable][order])
        num_drafts = int(np.argmax((outputs / (plain_s + added_s))[: num_room + 1]))
        if num_drafts and self._pass_cost is not None:
            added_s += self._passes_s(rows, row_numbers[order])
            num_drafts = int(np.argmax((outputs / (plain_s + added_s))[: num_room + 1]))
        counts: list[int] = np.bincount(row_numbers[order[:num_drafts]], minlength=len(rows)).tolist()
        probing_s = reading_s + self._attending_s(rows) + windows_s[:, 1] - windows_s[:, 0]
        self._probe(rows, counts, num_step_tokens, plain_s, probing_s.tolist(), num_room)
        return counts

    def _saved_s(
        self,
        rows: list[DraftRow],
        rates: npt.NDArray[np.float64],
        most: npt.NDArray[np.int64],
        plain_s: float,
        windows_s: npt.NDArray[np.float64],  # [rows, 1 + places]
        num_step_tokens: int,
    ) -> npt.NDArray[np.float64]:
        """Seconds that a draft model's drafts of the best length would save each row with every token.

        Each row is taken to bear its share of the step, and of passes for all rows that need one.
        """
        places = np.arange(1, windows_s.shape[1])
        added_s = self._step_cost(num_step_tokens + places) - self._step_cost(np.array(num_step_tokens))
        num_sharing = max(1, sum(row.num_unread >= 0 for row in rows))
        passes_s = float(self._pass_s(num_sharing)[-1]) / num_sharing + self._attending_s(rows)
        row_s = plain_s / len(rows)
        windows_s = row_s + added_s + places * passes_s[:, None] + windows_s[:, 1:] - windows_s[:, :1]
        num_tokens = 1 + np.cumsum(rates[:, None] ** places, axis=1)
        per_token_s = np.where(places <= most[:, None], windows_s / num_tokens, row_s)
        saved_s: npt.NDArray[np.float64] = row_s - per_token_s.min(axis=1)
        return saved_s

    def _reading_s(self, rows: list[DraftRow]) -> npt.NDArray[np.float64]:
        """Seconds that the draft model needs to read each row's unread tokens."""
        if self._pass_cost is None:
            return np.zeros(len(rows))
        num_unread = np.array([max(0, row.num_unread) for row in rows])
        return self._pass_cost(1 + num_unread) - self._pass_cost(np.ones(1, dtype=np.int64))

    def _attending_s(self, rows: list[DraftRow]) -> npt.NDArray[np.float64]:
        """Seconds that each row's context adds to a pass of the draft model."""
        if self._pass_cost is None:
            return np.zeros(len(rows))
        return self._pass_cost.of_context(np.array(1), np.array([row.num_context for row in rows]))

    def _pass_s(self, num_rows: int) -> npt.NDArray[np.float64]:
        """Seconds of passes of the draft model with 0 to `num_rows` rows."""
        if self._pass_cost is None:
            return np.zeros(num_rows + 1)
        return np.concatenate(([0.0], self._pass_cost(np.arange(1, num_rows + 1))))

    def _passes_s(self, rows: list[DraftRow], taken: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of the draft model's passes if the first 0, 1, … draft tokens are taken.

        Args:
            rows: the step's rows.
            taken: the row of each draft token, in the order in which they are taken.
        """
        if self._pass_cost is None:
            return np.zeros(taken.size + 1)
        pass_s = self._pass_s(len(rows)).tolist()
        context_s = self._attending_s(rows).tolist()
        num_tokens = [0] * len(rows)
        num_rows_at: list[int] = []
        added_s = [0.0]
        for number in taken.tolist():
            place = num_tokens[number]
            num_tokens[number] += 1
            if rows[number].num_unread < 0:
                added_s.append(0.0)
                continue
            num_rows_at += [0] * (place + 1 - len(num_rows_at))
            num_rows_at[place] += 1
            added_s.append(pass_s[num_rows_at[place]] - pass_s[num_rows_at[place] - 1] + context_s[number])
        return np.cumsum(added_s)

    def _probe(
        self,
        rows: list[DraftRow],
        counts: list[int],
        num_step_tokens: int,
        plain_s: float,
        probing_s: list[float],
        num_room: int,
    ) -> None:
        """Give one draft token to rows that have none and have saved its cost."""
        num_drafts, at = sum(counts), self._step_cost.at
        pass_s = [0.0] * (len(rows) + 1) if self._pass_cost is None else self._pass_s(len(rows)).tolist()
        num_drafting = sum(count > 0 and row.num_unread >= 0 for row, count in zip(rows, counts, strict=True))
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count or not row.num_most:
                continue
            state, has_pass = row.state, row.num_unread >= 0
            if row.num_unread > 0:
                state.fade()
            if row.num_unread > MAX_IN_STEP:  # it would read for a long time and then guess one token
                continue
            num_planned = num_step_tokens + num_drafts
            extra_s = at(num_planned + 1) - at(num_planned) + probing_s[number]
            if has_pass:
                extra_s += pass_s[num_drafting + 1] - pass_s[num_drafting]
            state.credit_s += self._probe_share * plain_s / len(rows)
            if state.credit_s >= extra_s and num_drafts < num_room:
                counts[number] = 1
                num_drafts += 1
                num_drafting += has_pass
                state.credit_s -= extra_s
