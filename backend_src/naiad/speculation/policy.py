"""How many draft tokens each sequence gets in a step: as many as pay."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from naiad.speculation.drafter import MAX_IN_STEP
from naiad.speculation.step_cost import StepCost

# What was seen of a sequence counts so much less with each window: about the last twenty count.
_MEMORY = 0.95
# And so much less with each step in which a draft model was not asked: after some hundred steps it is
# as if little had been seen.
_FADING = 0.996


@dataclass(slots=True)
class AcceptanceState:
    """How a sequence's drafts have done lately, and what it may spend to find out.

    Attributes:
        num_judged: draft tokens that were compared with the target's, older ones counting less: in
            each window the accepted ones and the first that was not. At first as if two had been.
        num_accepted: of those.
        credit_s: seconds of step time that may be spent on a probe.
    """

    num_judged: float = 2.0
    num_accepted: float = 1.0
    credit_s: float = 0.0

    @property
    def rate(self) -> float:
        """The chance that a draft token is accepted if those before it are."""
        return self.num_accepted / self.num_judged

    def update(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Take in one window's result; not to be called for a step without draft tokens."""
        assert 0 <= num_accepted_tokens <= num_draft_tokens > 0
        num_judged = min(num_accepted_tokens + 1, num_draft_tokens)
        self.num_judged = _MEMORY * self.num_judged + num_judged
        self.num_accepted = _MEMORY * self.num_accepted + num_accepted_tokens

    def fade(self) -> None:
        """Trust a little less in what was seen; to be called for a step without draft tokens."""
        self.num_judged = 2.0 + (self.num_judged - 2.0) * _FADING
        self.num_accepted = 1.0 + (self.num_accepted - 1.0) * _FADING


class DraftRow(NamedTuple):
    """What decides about one sequence's draft tokens in a step.

    Attributes:
        state: of its earlier drafts.
        num_most: draft tokens it can use: 0, or a ceiling, or better the length of a draft that is
            there already, because then no room is kept for sequences without one.
        num_unread: known tokens that the draft model has to read before its first pass for the
            sequence; −1: no model is needed, its draft is there already.
        num_left: tokens it may still make, ≥ 1.
        num_context: its known tokens; more cost more to attend to.
        is_drawn: whether its tokens are drawn: at each place of its draft too.
    """

    state: AcceptanceState
    num_most: int
    num_unread: int = -1
    num_left: int = 1
    num_context: int = 0
    is_drawn: bool = False


class SpeculationPolicy:
    """Shares out a step's draft tokens so that most tokens come out of a second.

    What they bring. If each draft token is accepted with chance a when those before it are, the
    j-th brings a**j tokens, and k of them make the one token of the step
    E(k) = 1 + a + … + a**k = (1 − a**(k + 1)) / (1 − a) (Leviathan et al., arXiv 2211.17192).

    What they cost. The step's seconds by its number of tokens were measured: flat while reading the
    weights is the limit, rising with each token when arithmetic is. Draft tokens cost what they add
    at the place of the curve where the other tokens of the step have led, what attention over
    their sequence's context adds for windows of one more, and what drawing a token costs where the
    sequence's are drawn. Prompts in the same step
    are not their business otherwise: what those cost is spent in any case. Where a model drafts,
    its j-th pass computes all rows that get j tokens or more, and a pass was measured likewise.

    What pays. Maximal is (tokens that come out) / (seconds of the step without prompts + seconds
    added). Of all ways to share out n draft tokens of free drafters the best takes the n likeliest,
    contexts being alike, so one pass over all tokens in order of a**j finds the maximum for every
    shape of the curve. A full
    batch, where a draft token costs as much as one that is certain, gets none. A draft model reads
    the known tokens of a sequence only if that is paid back by what its drafts may bring until the
    sequence ends.

    Finding out. A sequence that gets none would never show that it has become predictable. So each
    puts aside a small share of its step time, and when that pays for one draft token it gets it. At
    most this share is lost where speculation does not pay, besides what is lost before the first
    windows have told so. Where a draft model would have to read all that came since it was last
    asked, no share is enough: there what was seen of it fades instead, until it is tried again like
    a new one.

    The same calls give the same answers: nothing is drawn, no clock is read.
    """

    def __init__(
        self, step_cost: StepCost, probe_share: float = 0.01, pass_cost: StepCost | None = None
    ) -> None:
        """Plan for a machine.

        Args:
            step_cost: measured there, with the model that is served.
            probe_share: of a step's time that may be spent on sequences for which drafts do not
                pay, in [0, 1).
            pass_cost: the same of the draft model; None: there is none, or its passes are free.
        """
        self._step_cost = step_cost
        self._probe_share = probe_share
        self._pass_cost = pass_cost

    def plan(self, rows: list[DraftRow], num_step_tokens: int, num_room: int = sys.maxsize) -> list[int]:
        """Draft tokens for each row of the next step.

        Args:
            rows: all sequences that get a new token in the step.
            num_step_tokens: the step's tokens without drafts: a row's one, and prompts.
            num_room: draft tokens that the step has room for.

        Returns:
            For each row a number from 0 to its most; its state's credit has changed.
        """
        assert num_step_tokens >= len(rows), "each row has a token in the step"
        num_places = max((row.num_most for row in rows), default=0)
        if num_places == 0:
            return [0] * len(rows)
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
        most[reading_s * (1 - rates) > num_left * rates * plain_s / len(rows)] = 0
        is_usable = (places <= most[:, None]).ravel()
        gains = (rates[:, None] ** places).ravel()[is_usable]
        row_numbers = np.repeat(np.arange(len(rows)), num_places)[is_usable]
        order = np.argsort(-gains, kind="stable")
        # As far as probes may go too.
        costs = self._step_cost(num_step_tokens + np.arange(gains.size + len(rows) + 1))
        outputs = len(rows) + np.concatenate(([0.0], np.cumsum(gains[order])))
        added_s = costs[: gains.size + 1] - costs[0]
        added_s[1:] += np.cumsum(np.diff(windows_s).ravel()[is_usable][order])
        num_drafts = int(np.argmax((outputs / (plain_s + added_s))[: num_room + 1]))
        if num_drafts and self._pass_cost is not None:
            added_s += self._passes_s(rows, row_numbers[order])
            num_drafts = int(np.argmax((outputs / (plain_s + added_s))[: num_room + 1]))
        counts: list[int] = np.bincount(row_numbers[order[:num_drafts]], minlength=len(rows)).tolist()
        probing_s = reading_s + self._attending_s(rows) + windows_s[:, 1] - windows_s[:, 0]
        self._probe(rows, counts, costs, plain_s, probing_s, num_room)
        return counts

    def _reading_s(self, rows: list[DraftRow]) -> npt.NDArray[np.float64]:
        """Seconds that the draft model needs to read what each row has more than its last token."""
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
        """Seconds of the draft model's passes, if the first 0, 1, … tokens of an order are taken.

        Args:
            rows: the step's.
            taken: each token's row; a row's tokens come in their order.
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
        costs: npt.NDArray[np.float64],
        plain_s: float,
        probing_s: npt.NDArray[np.float64],
        num_room: int,
    ) -> None:
        """Give one token to rows that have none and have put aside what it costs."""
        num_drafts = sum(counts)
        pass_s = self._pass_s(len(rows))
        num_drafting = sum(count > 0 and row.num_unread >= 0 for row, count in zip(rows, counts, strict=True))
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count or not row.num_most:
                continue
            state, has_pass = row.state, row.num_unread >= 0
            if row.num_unread > 0:
                state.fade()
            if row.num_unread > MAX_IN_STEP:  # it would read for long and then guess one token
                continue
            extra_s = float(costs[num_drafts + 1] - costs[num_drafts] + probing_s[number])
            if has_pass:
                extra_s += float(pass_s[num_drafting + 1] - pass_s[num_drafting])
            state.credit_s += self._probe_share * plain_s / len(rows)
            if state.credit_s >= extra_s and num_drafts < num_room:
                counts[number] = 1
                num_drafts += 1
                num_drafting += has_pass
                state.credit_s -= extra_s
