"""`llm`'s output tensors for one chunk of one row. Every response has a batch dimension of 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.outputs import RequestOutput
from naiad.triton_server.beam_response import BeamRow, beam_tensors
from naiad.triton_server.detail_tensors import detail_tensors, perf_tensors
from naiad.triton_server.output_wishes import OutputWishes
from naiad.triton_server.response_stream import ResponseStream, StreamRow, Tensors


def response_tensors(stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> Tensors:
    """A response of new tokens, or of all results of a beam search.

    Streamed `output_ids` are deltas; unstreamed ones hold the prompt too unless it is excluded.

    Returns:
        output_ids [1, 1, n] int32, sequence_length [1, 1] int32, what the request asked for,
        and for a detokenizer the tensors of the interface between the steps. For beams see
        `beam_tensors`.
    """
    request = stream.request
    prompt = request.rows[row.index].prompt_token_ids
    is_echoing = not request.streaming and not request.exclude_input
    tensors = _wished_tensors(request.wishes, len(prompt), chunk)
    if isinstance(row, BeamRow):
        tensors |= beam_tensors(stream, row, is_echoing)
    else:
        tensors |= _sequence_tensors(stream, row, chunk, is_echoing)
    if len(request.rows) > 1:
        tensors["batch_index"] = _int32(row.index)
    return tensors


def _sequence_tensors(
    stream: ResponseStream, row: StreamRow, chunk: RequestOutput, is_echoing: bool
) -> Tensors:
    wishes, prompt = stream.request.wishes, stream.request.rows[row.index].prompt_token_ids
    ids = prompt + chunk.token_ids if is_echoing else chunk.token_ids
    tensors: Tensors = {
        "output_ids": np.array([[ids]], dtype=np.int32),
        "sequence_length": _int32(len(ids)),
    }
    if wishes.num_return_sequences > 1:
        tensors["sequence_index"] = _int32(row.sequence_index)
    tensors |= detail_tensors(wishes, len(prompt), chunk)
    if stream.request.rows[row.index].text is not None:
        tensors |= _detokenizer_tensors(stream, row, chunk, is_echoing)
    return tensors


def _wished_tensors(wishes: OutputWishes, num_prompt_tokens: int, chunk: RequestOutput) -> Tensors:
    tensors: Tensors = {}
    if wishes.finish_reason:
        tensors["finish_reason"] = _string(chunk.finish_reason.value if chunk.finish_reason else "")
        tensors["stop_reason"] = _string(chunk.stop_reason)
    if wishes.num_input_tokens:
        tensors["num_input_tokens"] = _int32(num_prompt_tokens)
    if wishes.num_output_tokens:
        tensors["num_output_tokens"] = _int32(len(chunk.token_ids))
    if wishes.num_cached_tokens:
        tensors["num_cached_tokens"] = _int32(chunk.num_cached_tokens)
    return tensors | perf_tensors(wishes, chunk)


def probe_tensors(stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> Tensors:
    """An empty chunk: the detokenizer swallows it and says whether the client is still there."""
    return {
        "output_ids": np.zeros((1, 1, 0), dtype=np.int32),
        "sequence_length": _int32(0),
        "sequence_id": np.array([[chunk.sequence_id]], dtype=np.uint64),
        "window_ids": np.zeros((1, 0), dtype=np.int32),
    }


def _detokenizer_tensors(
    stream: ResponseStream, row: StreamRow, chunk: RequestOutput, is_echoing: bool
) -> Tensors:
    asked = stream.request.rows[row.index]
    window = asked.prompt_token_ids if is_echoing else chunk.window_ids
    tensors: Tensors = {
        "sequence_id": np.array([[row.sequence_id]], dtype=np.uint64),
        "window_ids": np.array([window + chunk.token_ids], dtype=np.int32),
    }
    if chunk.finish_reason is None:
        # Each tensor costs time on its way: those that would say what holds without them are left out.
        assert not is_echoing, "unstreamed, and not the last"
        assert not chunk.is_cut, "cut, and not the last"
        return tensors
    max_chars = chunk.num_chars if chunk.is_cut else -1
    if is_echoing and chunk.is_cut and asked.text is not None:
        max_chars += asked.text.num_prompt_chars
    return tensors | {
        "num_emitted_tokens": _int32(0 if is_echoing else len(window)),
        "max_chars": _int32(max_chars),
        "is_last": np.array([[True]]),
    }


def _int32(value: int) -> npt.NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)


def _string(value: str) -> npt.NDArray[Any]:
    return np.array([[value.encode()]], dtype=np.object_)
