"""All results of one beam search as one response, as the reference sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from naiad.triton_server.joined_row import JoinedRow
from naiad.triton_server.response_stream import ResponseStream, Tensors

PADDING_ID = -1


class BeamRow(JoinedRow):
    """One search; its sequences are its results, best first."""

    __slots__ = ()

    @property
    def abort_ids(self) -> tuple[int, ...]:
        """The first one ends the search, and with it the others."""
        return (self.sequence_id,)


def beam_tensors(stream: ResponseStream, row: BeamRow, is_echoing: bool) -> Tensors:
    """The tokens of k beams, n the most of one; with the prompt if it is echoed.

    Returns:
        output_ids [1, k, n] int32, filled up with −1; sequence_length [1, k] int32. With
        return_log_probs: output_log_probs [1, k, m] float32 of the m new tokens at most, filled up
        with 0, and cum_log_probs [1, k] float32, the scores. With return_num_output_tokens:
        num_output_tokens [1, 1] int32 of all of them. For a detokenizer: beam_max_chars [1, k]
        int32 and the tensors of a last chunk.
    """
    wishes, asked = stream.request.wishes, stream.request.rows[row.index]
    beams = row.in_order(wishes.num_return_sequences)
    prompt = asked.prompt_token_ids if is_echoing else []
    ids = [prompt + beam.token_ids for beam in beams]
    tensors: Tensors = {
        "output_ids": _padded(ids, PADDING_ID, np.int32),
        "sequence_length": _row([len(each) for each in ids], np.int32),
    }
    if wishes.log_probs:
        log_probs = [[each.log_prob for each in beam.log_probs] for beam in beams]
        tensors["output_log_probs"] = _padded(log_probs, 0.0, np.float32)
        tensors["cum_log_probs"] = _row([beam.cum_log_prob for beam in beams], np.float32)
    if wishes.num_output_tokens:
        tensors["num_output_tokens"] = _row([sum(len(beam.token_ids) for beam in beams)], np.int32)
    if asked.text is not None:
        # An echoed prompt begins each beam's ids; otherwise all texts stand behind the same window.
        window = [] if is_echoing else beams[0].window_ids
        num_prompt_chars = asked.text.num_prompt_chars if is_echoing else 0
        cuts = [num_prompt_chars + beam.num_chars if beam.is_cut else -1 for beam in beams]
        tensors |= {
            "sequence_id": _row([row.sequence_id], np.uint64),
            "window_ids": _row(window, np.int32),
            "num_emitted_tokens": _row([len(window)], np.int32),
            "max_chars": _row([-1], np.int32),
            "beam_max_chars": _row(cuts, np.int32),
            "is_last": _row([True], np.bool_),
        }
    return tensors


def _row(values: Sequence[float], kind: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.array([values], dtype=kind)


def _padded(
    rows: Sequence[Sequence[float]], padding: float, kind: type[np.generic]
) -> npt.NDArray[np.generic]:
    filled = np.full((1, len(rows), max(len(row) for row in rows)), padding, dtype=kind)
    for target, row in zip(filled[0], rows, strict=True):
        target[: len(row)] = row
    return filled
