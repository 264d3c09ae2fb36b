"""What a client wants to see besides tokens. A wish is the whole request's, not one row's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naiad.errors import InvalidRequestError
from naiad.triton_server.request_fields import Scalar
from naiad.triton_server.request_limits import MAX_LOGITS_BYTES

_BYTES_PER_LOGIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWishes:
    """Which outputs are sent.

    Attributes:
        num_log_probs: best tokens that are shown at each new token's place; 0 = none.
        beam_width: of each prompt's search; 1 = none.
        num_return_sequences: sequences that are sent of each prompt, ≥ 1.
    """

    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    num_cached_tokens: bool
    log_probs: bool
    num_log_probs: int
    context_logits: bool
    generation_logits: bool
    perf_metrics: bool
    num_return_sequences: int
    beam_width: int = 1

    @property
    def num_sequences(self) -> int:
        """Sequences from each prompt: of a search there are more than are sent."""
        return max(self.beam_width, self.num_return_sequences)

    @property
    def num_engine_log_probs(self) -> int:
        """What `SamplingParams.num_log_probs` must be: −1 = no log-probabilities at all."""
        return self.num_log_probs if self.log_probs or self.num_log_probs else -1


def read_wishes(scalars: Mapping[str, Scalar | None]) -> OutputWishes:
    """The wishes of checked scalars; what was not sent is None or absent."""
    beam_width = int(scalars.get("beam_width") or 1)
    return OutputWishes(
        finish_reason=bool(scalars.get("return_finish_reason")),
        num_input_tokens=bool(scalars.get("return_num_input_tokens")),
        num_output_tokens=bool(scalars.get("return_num_output_tokens")),
        num_cached_tokens=bool(scalars.get("return_num_cached_tokens")),
        log_probs=bool(scalars.get("return_log_probs")),
        num_log_probs=int(scalars.get("num_log_probs") or 0),
        context_logits=bool(scalars.get("return_context_logits")),
        generation_logits=bool(scalars.get("return_generation_logits")),
        perf_metrics=bool(scalars.get("return_perf_metrics")),
        num_return_sequences=int(scalars.get("num_return_sequences") or beam_width),
        beam_width=beam_width,
    )


def check_logits_size(
    wishes: OutputWishes, lengths: Sequence[tuple[int, int]], vocab_size: int, *, is_streaming: bool
) -> None:
    """Refuse a request whose logits would be too many.

    Args:
        wishes: what it wants.
        lengths: of each row the prompt's tokens and the new ones at most.
        vocab_size: logits of one position.
        is_streaming: whether its answer comes in several responses.

    Raises:
        InvalidRequestError: names the bytes that it would take.
    """
    num_positions = 0
    if wishes.context_logits:
        num_times = 2 if is_streaming else 1  # with the first response and with the last
        num_positions += num_times * sum(num_prompt_tokens for num_prompt_tokens, _ in lengths)
    if wishes.generation_logits:
        num_positions += wishes.num_return_sequences * sum(max_tokens for _, max_tokens in lengths)
    num_bytes = num_positions * vocab_size * _BYTES_PER_LOGIT
    if num_bytes > MAX_LOGITS_BYTES:
        raise InvalidRequestError(
            f"return_context_logits and return_generation_logits ask for {num_bytes} bytes "
            f"({num_positions} positions of {vocab_size} logits): at most {MAX_LOGITS_BYTES} are allowed"
        )
