"""What the sampler knows of a row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from naiad.sequence import SamplingParams, Sequence


class SampledRow(Protocol):
    """Tokens that a new one follows, and how it is chosen; a `Sequence` is one."""

    @property
    def sequence_id(self) -> int:
        """Tells the rows of a pass apart."""

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of the known tokens, how many the client sent."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""

    @property
    def num_output_tokens(self) -> int:
        """Known tokens behind the prompt."""

    @property
    def token_ids(self) -> list[int]:
        """The known tokens; not to be changed."""

    @property
    def output_token_ids(self) -> list[int]:
        """Those behind the prompt; a copy."""


@dataclass(slots=True, eq=False)
class DraftedRow:
    """A sequence as if some drafts were known. Its ids are put together only for who asks for them."""

    sequence_id: int
    sequence: Sequence
    draft_token_ids: list[int]

    @property
    def params(self) -> SamplingParams:
        """See `SampledRow`."""
        return self.sequence.params

    @property
    def num_prompt_tokens(self) -> int:
        """See `SampledRow`."""
        return self.sequence.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """See `SampledRow`."""
        return self.sequence.num_tokens + len(self.draft_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """See `SampledRow`."""
        return self.sequence.num_output_tokens + len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """See `SampledRow`."""
        return self.sequence.token_ids + self.draft_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        """See `SampledRow`."""
        return self.sequence.output_token_ids + self.draft_token_ids
