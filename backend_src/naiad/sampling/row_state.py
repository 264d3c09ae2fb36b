"""The state that sampling keeps of a sequence between steps, also as seen after each of its drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from naiad.sampling.noise import noise_stream
from naiad.sequence import SamplingParams


class TokenState(Protocol):
    """The state that one feature keeps of a row's tokens: counts, the last few ids, a grammar's state."""

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Take in the next known tokens, either all from the prompt or all from the output."""

    def clone(self) -> TokenState:
        """Return an equal state that advances on its own."""


class Stateful(Protocol):
    """A feature that may keep state for the rows to which it applies."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether the feature applies to rows with these parameters."""

    def new_state(self, params: SamplingParams) -> TokenState | None:
        """Return the state of a row without tokens; None: the feature needs no state."""


class RowState:
    """The sampler's state for one row of logits: what it needs to choose the row's next token.

    It belongs to one sequence, or to one place within a sequence's drafts (`at`). It is made when a
    sequence is admitted, advanced by the tokens of its rows, and cloned for siblings and beams.

    Attributes:
        sequence_id: identifies the row within a sampling pass.
        params: the request's sampling parameters.
        num_prompt_tokens: how many of the known tokens belong to the prompt.
        num_tokens: number of known tokens: prompt and output.
        noise: the row's noise stream; see `noise_stream`.
        states: feature → its state for the row.
        is_plain: whether the row is sampled from its logits as they are, perhaps among some tokens only, and
            nothing else is asked of them.
    """

    __slots__ = ("is_plain", "noise", "num_prompt_tokens", "num_tokens", "params", "sequence_id", "states")

    def __init__(
        self,
        sequence_id: int,
        params: SamplingParams,
        num_prompt_tokens: int,
        states: Mapping[Stateful, TokenState],
        num_tokens: int = 0,
        noise: int | None = None,
        is_plain: bool = False,
    ) -> None:
        """Build a row whose `states` include the first `num_tokens` tokens; `noise` None: from the seed."""
        self.sequence_id = sequence_id
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_tokens
        self.noise = noise_stream(params.seed) if noise is None else noise
        self.states = states
        self.is_plain = is_plain

    @property
    def num_output_tokens(self) -> int:
        """Number of known tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the next known tokens; they may include the end of the prompt."""
        if self.states:
            num_of_prompt = max(0, self.num_prompt_tokens - self.num_tokens)
            prompt, output = token_ids[:num_of_prompt], token_ids[num_of_prompt:]
            for state in self.states.values():
                if prompt:
                    state.advance(prompt, True)
                if output:
                    state.advance(output, False)
        self.num_tokens += len(token_ids)

    def clone(self, sequence_id: int, params: SamplingParams | None = None) -> RowState:
        """Return a row with the same known tokens for another sequence.

        Args:
            sequence_id: the clone's id.
            params: the clone's parameters, to which the same features apply, for example with another
                seed; None: this row's.
        """
        states = {feature: state.clone() for feature, state in self.states.items()} if self.states else {}
        noise = self.noise if params is None else None
        return RowState(
            sequence_id,
            params or self.params,
            self.num_prompt_tokens,
            states,
            self.num_tokens,
            noise,
            self.is_plain,
        )

    def at(self, view_id: int, draft_token_ids: Sequence[int]) -> RowState:
        """Return a copy of the row, under its own id, as if these drafts were known."""
        view = self.clone(view_id)
        view.advance(draft_token_ids)
        return view


def new_row(
    features: Iterable[Stateful],
    sequence_id: int,
    params: SamplingParams,
    num_prompt_tokens: int,
    selecting: Stateful | None = None,
) -> RowState:
    """Return the state of a sequence without known tokens, including each feature's state.

    Args:
        features: those that may apply.
        sequence_id: the sequence's id.
        params: its sampling parameters.
        num_prompt_tokens: number of tokens of its prompt.
        selecting: the one of `features` that only says which tokens are allowed; None: each does more.
    """
    applied = [feature for feature in features if feature.applies_to(params)]
    states = {feature: state for feature in applied if (state := feature.new_state(params)) is not None}
    asks = params.num_log_probs >= 0 or params.returns_generation_logits or params.num_candidates > 0
    is_plain = not asks and all(feature is selecting for feature in applied)
    return RowState(sequence_id, params, num_prompt_tokens, states, is_plain=is_plain)
