"""What the sampler makes of rows of logits."""

from __future__ import annotations

from dataclasses import dataclass, field

from naiad.errors import NaiadError
from naiad.outputs import TokenLogProbs


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    """One token a row, by the rows' sequence ids; otherwise as in `ModelOutput`.

    Attributes:
        sampled_token_ids: of rows that are not beams and have not failed.
        errors: why a row has no token.
        log_probs, generation_logits: of rows with a token that asked.
        candidates: of beams.
    """

    sampled_token_ids: dict[int, int] = field(default_factory=dict)
    errors: dict[int, NaiadError] = field(default_factory=dict)
    log_probs: dict[int, TokenLogProbs] = field(default_factory=dict)
    generation_logits: dict[int, bytes] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
