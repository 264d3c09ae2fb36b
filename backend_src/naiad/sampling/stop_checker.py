"""Decides by ids alone whether the last sampled token ends its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a sequence.

    Attributes:
        finish_reason: STOP or LENGTH.
        keeps_token: whether the last token is part of the output.
        stop_reason: the matching ids in decimal, separated by commas.
    """

    finish_reason: FinishReason
    keeps_token: bool = True
    stop_reason: str = ""


def check_stop(sequence: Sequence, num_tokens: int) -> Stop | None:
    """Check whether a sequence ends after its first `num_tokens` known tokens.

    A stop id takes precedence over a stop sequence, and both over the length. `min_tokens` applies to
    stop ids only: a stop sequence (or stop string) ends the text whenever it appears, and so does the id
    with which a grammar's text ends.

    Args:
        sequence: the sequence.
        num_tokens: the last one of these tokens belongs to the output.
    """
    params = sequence.params
    num_output_tokens = num_tokens - sequence.num_prompt_tokens
    token_id = sequence.token_ids[num_tokens - 1]
    is_stop_id = token_id in params.stop_token_ids and num_output_tokens > params.min_tokens
    if is_stop_id or (sequence.grammar is not None and token_id in sequence.grammar.end_token_ids):
        return Stop(FinishReason.STOP, keeps_token=False, stop_reason=str(token_id))
    for stop_ids in params.stop_sequences:
        if len(stop_ids) <= num_output_tokens and _ends_with(sequence.token_ids, num_tokens, stop_ids):
            return Stop(FinishReason.STOP, stop_reason=",".join(map(str, stop_ids)))
    if num_output_tokens >= params.max_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def first_stop(sequence: Sequence, num_before: int) -> tuple[Stop | None, int]:
    """Find the first token after the first `num_before` ones that ends the sequence.

    Returns:
        The stop and the number of known tokens up to it; without a stop, None and all known tokens.
    """
    for num_known in range(num_before + 1, sequence.num_tokens + 1):
        stop = check_stop(sequence, num_known)
        if stop is not None:
            return stop, num_known
    return None, sequence.num_tokens


def _ends_with(token_ids: list[int], end: int, stop_ids: tuple[int, ...]) -> bool:
    # Comparing the last id first nearly always avoids the slice.
    return (
        bool(stop_ids)
        and token_ids[end - 1] == stop_ids[-1]
        and tuple(token_ids[end - len(stop_ids) : end]) == stop_ids
    )
