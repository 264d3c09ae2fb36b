"""What sampling keeps of a sequence from step to step, and the views of it as if drafts were known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from naiad.sampling.noise import noise_stream
from naiad.sequence import SamplingParams


class TokenState(Protocol):
    """What one feature keeps of a row's tokens: counts, a last few ids, a grammar's state."""

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Take in the next known tokens, all of the prompt or all of the output."""

    def clone(self) -> TokenState:
        """An equal state that advances on its own."""


class Stateful(Protocol):
    """A feature that keeps something of the rows to which it applies."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters is changed."""

    def new_state(self, params: SamplingParams) -> TokenState | None:
        """The state of a row without tokens; None: the row's tokens do not matter to this feature."""


class RowState:
    """A row of logits for the sampler: known tokens that a new one follows, and how it is chosen.

    It belongs to one sequence, or to one place within a sequence's drafts (`at`). It is made when a
    sequence is admitted, advanced by the tokens of its rows, and cloned for siblings and beams.

    Attributes:
        sequence_id: tells the rows of a pass apart.
        params: what was asked for.
        num_prompt_tokens: of the known tokens, how many the client sent.
        num_tokens: known tokens: prompt and output.
        noise: the stream of the row's noise; see `noise_stream`.
        states: feature → what it keeps of the row.
    """

    __slots__ = ("noise", "num_prompt_tokens", "num_tokens", "params", "sequence_id", "states")

    def __init__(
        self,
        sequence_id: int,
        params: SamplingParams,
        num_prompt_tokens: int,
        states: Mapping[Stateful, TokenState],
        num_tokens: int = 0,
        noise: int | None = None,
    ) -> None:
        """Join the parts; `states` have taken in the first `num_tokens` tokens, and `noise` None is made."""
        self.sequence_id = sequence_id
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_tokens
        self.noise = noise_stream(params.seed) if noise is None else noise
        self.states = states

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the next known tokens, wherever the prompt ends among them."""
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
        """The same known tokens for another sequence, perhaps with another seed.

        Args:
            sequence_id: of the clone.
            params: of the clone, which ask for the same features; None: the same.
        """
        states = {feature: state.clone() for feature, state in self.states.items()} if self.states else {}
        num_prompt, num_tokens = self.num_prompt_tokens, self.num_tokens
        if params is None:
            return RowState(sequence_id, self.params, num_prompt, states, num_tokens, self.noise)
        return RowState(sequence_id, params, num_prompt, states, num_tokens)

    def at(self, view_id: int, draft_token_ids: Sequence[int]) -> RowState:
        """The row as if these drafts were known, under an id of its own."""
        view = self.clone(view_id)
        view.advance(draft_token_ids)
        return view


def new_row(
    features: Iterable[Stateful], sequence_id: int, params: SamplingParams, num_prompt_tokens: int
) -> RowState:
    """The state of a sequence without known tokens, with what each of the features keeps of it."""
    states: dict[Stateful, TokenState] = {}
    for feature in features:
        state = feature.new_state(params) if feature.applies_to(params) else None
        if state is not None:
            states[feature] = state
    return RowState(sequence_id, params, num_prompt_tokens, states)
