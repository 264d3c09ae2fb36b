"""Reads the responses of a model that returns text."""

from __future__ import annotations

from typing import Any

from naiad.errors import CancelledError, InternalError, NaiadError
from naiad.openai_server.api.parsing.output_parser import OutputParser
from naiad.openai_server.api.parsing.pieces import ParsedDelta, Piece
from naiad.openai_server.api.tally import SequenceDelta
from naiad.outputs import RequestOutput
from naiad.sequence import UNKNOWN_TOKEN, FinishReason

_FAILURES: dict[FinishReason, NaiadError] = {
    FinishReason.CANCELLED: CancelledError("the request was cancelled"),
    FinishReason.ERROR: InternalError("the remote model has failed"),
}


def read_response(result: Any, first: int, stop_words: list[str]) -> SequenceDelta:
    """Read a response.

    Args:
        result: an `InferResult`.
        first: the choice of its prompt's first sequence.
        stop_words: the request's; only a text that ends a sequence and is one of them has cut it.

    Returns:
        What it adds to a sequence; the ids of its tokens are `UNKNOWN_TOKEN`.

    Raises:
        NaiadError: it says that the sequence has failed.
    """
    reason = _text(result, "finish_reason")
    finish_reason = FinishReason(reason) if reason else None
    if finish_reason in _FAILURES:
        raise _FAILURES[finish_reason]
    stop_reason = _text(result, "stop_reason")
    output = RequestOutput(
        sequence_id=0,
        token_ids=[UNKNOWN_TOKEN] * _number(result, "num_output_tokens"),
        is_cut=finish_reason is FinishReason.STOP and stop_reason in stop_words,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=_number(result, "num_cached_tokens"),
        num_draft_tokens=_number(result, "total_draft_tokens"),
        num_accepted_tokens=_number(result, "total_accepted_draft_tokens"),
    )
    return SequenceDelta(first + _number(result, "sequence_index"), _text(result, "text_output"), output)


def parsed(delta: SequenceDelta, parser: OutputParser) -> SequenceDelta:
    """Take the text of a delta apart.

    Which of its tokens belong to which part is not known: those of a delta that ends the reasoning count
    as reasoning but for the last.
    """
    pieces = [Piece("", each) for each in delta.output.token_ids[1:]]
    if delta.text or delta.output.token_ids:
        pieces.append(Piece(delta.text, UNKNOWN_TOKEN if delta.output.token_ids else None))
    parts: ParsedDelta = parser.parse_delta(pieces, finished=delta.is_last)
    return SequenceDelta(delta.index, delta.text, delta.output, parts)


def _text(result: Any, name: str) -> str:
    values = result.as_numpy(name)
    return "" if values is None or not values.size else bytes(values.reshape(-1)[0]).decode(errors="replace")


def _number(result: Any, name: str) -> int:
    values = result.as_numpy(name)
    return 0 if values is None or not values.size else int(values.reshape(-1)[0])
