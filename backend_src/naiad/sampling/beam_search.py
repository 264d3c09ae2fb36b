"""Beam search over candidates: which beams continue, which are finished, and when the search ends.

The rules are those of `transformers` (5.x), so that the same logits give the same beams and
scores. No tensors: a step has a few dozen candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

Candidate = tuple[int, float]
"""A token id and its log-probability as the logits processors left it: not normalised, maybe above 0."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A running or ended text.

    Attributes:
        token_ids: the output's tokens.
        log_probs: log-probability of each token.
        sum_log_probs: their sum.
        score: the sum divided by (number of tokens) ** length_penalty; set when the beam has ended.
        is_stopped: whether it ended with a stop id (its last token), not at the maximum length.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    sum_log_probs: float = 0.0
    score: float = 0.0
    is_stopped: bool = False

    def longer(self, candidate: Candidate) -> Beam:
        """Return this beam with one more token."""
        token_id, log_prob = candidate
        return Beam((*self.token_ids, token_id), (*self.log_probs, log_prob), self.sum_log_probs + log_prob)


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The parameters of a search.

    Attributes:
        width: number of beams, ≥ 2.
        max_tokens: maximum tokens of an output.
        stop_token_ids: ids that end a beam.
        length_penalty: exponent of the length in the score; > 0 prefers long texts.
        stops_early: end when `width` beams have ended; otherwise continue while a running beam,
            at its present length, could beat the worst of them.
        diversity_rate: multiplied by the parent's rank (0 = the best) and added to an option's sum
            when the next beams are chosen; not part of `sum_log_probs` and `score`.
    """

    width: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    stops_early: bool = False
    diversity_rate: float = 0.0

    @property
    def num_candidates(self) -> int:
        """Candidates per beam: enough that `width` remain even if all stop ids are among them."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width


class BeamSearch:
    """The state of one search.

    Attributes:
        running: the running beams, best first; initially one empty beam.
    """

    def __init__(self, rules: BeamRules) -> None:
        """Start with the prompt alone."""
        self._rules = rules
        self._finished: list[Beam] = []
        self.running = [Beam()]

    def advance(self, candidates: list[list[Candidate]]) -> list[int] | None:
        """Extend all running beams by a token.

        Args:
            candidates: the best `num_candidates` of each running beam; fewer or none if fewer tokens
                are possible. Then fewer beams may remain, too.

        Returns:
            For each new running beam the index of the beam that it continues; None when
            the search is over.
        """
        rules = self._rules
        options = [
            (parent, self.running[parent].longer(candidate))
            for parent, row in enumerate(candidates)
            for candidate in row
        ]
        options.sort(key=lambda option: -option[1].sum_log_probs - rules.diversity_rate * option[0])
        options = options[: rules.num_candidates]
        self._finish([beam for _, beam in options[: rules.width] if self._has_ended(beam)])
        going_on = [option for option in options if not self._has_ended(option[1])][: rules.width]
        self.running = [beam for _, beam in going_on]
        if not self.running or self._is_over():
            return None
        return [parent for parent, _ in going_on]

    def best(self) -> list[Beam]:
        """The ended beams, best first; at most `width`, and none if no token was possible."""
        return self._finished

    def best_so_far(self) -> list[Beam]:
        """The ended beams, then the running ones, all with their scores; at most `width`."""
        running = [self._scored(beam) for beam in self.running if beam.token_ids]
        return [*self._finished, *running][: self._rules.width]

    def _has_ended(self, beam: Beam) -> bool:
        return (
            beam.token_ids[-1] in self._rules.stop_token_ids or len(beam.token_ids) >= self._rules.max_tokens
        )

    def _finish(self, beams: list[Beam]) -> None:
        merged = self._finished + [self._scored(beam) for beam in beams]
        merged.sort(key=lambda beam: -beam.score)
        self._finished = merged[: self._rules.width]

    def _scored(self, beam: Beam) -> Beam:
        return Beam(
            beam.token_ids,
            beam.log_probs,
            beam.sum_log_probs,
            beam.sum_log_probs / len(beam.token_ids) ** self._rules.length_penalty,
            beam.token_ids[-1] in self._rules.stop_token_ids,
        )

    def _is_over(self) -> bool:
        if len(self._finished) < self._rules.width:
            return False
        if self._rules.stops_early:
            return True
        # Estimated at the present length, as in transformers.
        return self._scored(self.running[0]).score <= self._finished[-1].score
