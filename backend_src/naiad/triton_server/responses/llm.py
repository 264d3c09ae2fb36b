"""`llm`'s writer: turns chunks into token ids. Every response has a batch dimension of 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from naiad.frontend.chunks import Chunk
from naiad.triton_server.responses.details import detail_tensors, int32_tensor, padded
from naiad.triton_server.responses.short_chunk import TEXT_CHUNK, ShortChunk
from naiad.triton_server.responses.stream import StreamRow, Tensors

PADDING_ID = -1


def response_tensors(row: StreamRow, chunk: Chunk) -> Tensors:
    """Return a response with new tokens, or with all results of a beam search.

    Streamed `output_ids` are deltas; unstreamed ones include the prompt unless it is excluded.

    Returns:
        output_ids [1, k, n] int32, where k is 1 or the number of beams and n the length of the longest,
        padded with −1; sequence_length [1, k] int32; the tensors of `detail_tensors`; and, if a
        detokenizer follows, the internal tensors that it needs. If more chunks follow and the detokenizer
        takes it, `text_chunk` stands for all of these but the details.
    """
    if row.takes_text_chunks and not chunk.is_last:
        return _short_chunk(chunk) | detail_tensors(chunk)
    ids = [output.token_ids for output in chunk.outputs]
    if chunk.is_echoing:
        ids = [chunk.prompt_token_ids + each for each in ids]
    tensors: Tensors = {
        "output_ids": padded(ids, PADDING_ID, np.int32) if len(ids) > 1 else np.array([ids], dtype=np.int32),
        "sequence_length": np.array([[len(each) for each in ids]], dtype=np.int32),
    }
    tensors |= detail_tensors(chunk)
    if chunk.request.rows[chunk.row_index].text is not None:
        tensors |= _beam_context(chunk) if chunk.is_beam_search else _text_context(chunk)
    return tensors


def probe_tensors(row: StreamRow) -> Tensors:
    """Return an empty chunk: the detokenizer sends nothing, but reports whether the client is still there."""
    if row.takes_text_chunks:
        return {TEXT_CHUNK: ShortChunk(row.sequence_id, [], 0).tensor()}
    return {
        "output_ids": np.zeros((1, 1, 0), dtype=np.int32),
        "sequence_length": int32_tensor(0),
        "sequence_id": _uint64_tensor(row.sequence_id),
        "window_ids": np.zeros((1, 0), dtype=np.int32),
    }


def _short_chunk(chunk: Chunk) -> Tensors:
    """Return what the detokenizer needs to turn new tokens into text, if more follow."""
    _check_goes_on(chunk)
    window, new_ids = chunk.first.window_ids, chunk.first.token_ids
    return {TEXT_CHUNK: ShortChunk(chunk.sequence_id, window + new_ids, len(new_ids)).tensor()}


def _text_context(chunk: Chunk) -> Tensors:
    """Return what the detokenizer needs to turn new tokens into text."""
    output, is_echoing = chunk.first, chunk.is_echoing
    window = chunk.prompt_token_ids if is_echoing else output.window_ids
    tensors: Tensors = {
        "sequence_id": _uint64_tensor(chunk.sequence_id),
        "window_ids": _int32_row(window + output.token_ids),
    }
    if not chunk.is_last:
        # Each tensor costs time in transit, so those that hold the detokenizer's defaults are left out.
        _check_goes_on(chunk)
        return tensors
    max_chars = output.num_chars if output.is_cut else -1
    if is_echoing and output.is_cut:
        max_chars += chunk.num_prompt_chars
    tensors["num_emitted_tokens"] = int32_tensor(0 if is_echoing else len(window))
    tensors["max_chars"] = int32_tensor(max_chars)
    tensors["is_last"] = np.array([[True]])
    return tensors


def _check_goes_on(chunk: Chunk) -> None:
    assert not chunk.is_echoing, "an unstreamed chunk that is not the last"
    assert not chunk.first.is_cut, "a cut chunk that is not the last"


def _beam_context(chunk: Chunk) -> Tensors:
    """Return what the detokenizer needs for k beams: the window, and the cuts beam_max_chars [1, k] int32."""
    # If the prompt is echoed, each beam's ids begin with it; otherwise all beams follow the same window.
    window = [] if chunk.is_echoing else chunk.first.window_ids
    num_prompt_chars = chunk.num_prompt_chars if chunk.is_echoing else 0
    return {
        "sequence_id": _uint64_tensor(chunk.sequence_id),
        "window_ids": _int32_row(window),
        "num_emitted_tokens": int32_tensor(len(window)),
        "max_chars": int32_tensor(-1),
        "beam_max_chars": _int32_row(
            [num_prompt_chars + beam.num_chars if beam.is_cut else -1 for beam in chunk.outputs]
        ),
        "is_last": np.array([[True]]),
    }


def _int32_row(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array([values], dtype=np.int32)


def _uint64_tensor(value: int) -> npt.NDArray[np.uint64]:
    return np.array([[value]], dtype=np.uint64)
