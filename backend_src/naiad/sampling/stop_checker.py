"""Whether the token sampled last ends its sequence, judged by ids alone."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """A sequence ends here.

    Attributes:
        finish_reason: STOP or LENGTH.
        keeps_token: whether the last token is part of the output.
        stop_reason: the id, or the ids, that matched, in decimal.
    """

    finish_reason: FinishReason
    keeps_token: bool = True
    stop_reason: str = ""


def check_stop(sequence: Sequence, max_model_len: int) -> Stop | None:
    """Judge a sequence whose newest token has just been appended.

    A stop id comes first, then a stop sequence, then the lengths. `min_tokens` holds back stop
    ids only: what a user listed as a stop sequence (or stop string) ends the text whenever it
    appears.

    Args:
        sequence: has at least one output token.
        max_model_len: tokens of prompt and output together, at most.
    """
    params = sequence.params
    num_output_tokens = sequence.num_output_tokens
    token_id = sequence.token_ids[-1]
    if token_id in params.stop_token_ids and num_output_tokens > params.min_tokens:
        return Stop(FinishReason.STOP, keeps_token=False, stop_reason=str(token_id))
    for stop_ids in params.stop_sequences:
        if len(stop_ids) <= num_output_tokens and _ends_with(sequence.token_ids, stop_ids):
            return Stop(FinishReason.STOP, stop_reason=",".join(map(str, stop_ids)))
    if num_output_tokens >= params.max_tokens or sequence.num_tokens >= max_model_len:
        return Stop(FinishReason.LENGTH)
    return None


def _ends_with(token_ids: list[int], stop_ids: tuple[int, ...]) -> bool:
    # The last id decides nearly always: no slice is made for it.
    return bool(stop_ids) and token_ids[-1] == stop_ids[-1] and tuple(token_ids[-len(stop_ids) :]) == stop_ids
