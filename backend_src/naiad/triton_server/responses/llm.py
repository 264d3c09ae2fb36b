"""`llm`'s output tensors for one chunk of one row. Every response has a batch dimension of 1.

Log-probabilities and logits speak of new tokens only, also where `output_ids` holds the prompt too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.frontend.request import RequestedOutputs
from naiad.outputs import RequestOutput, Timings
from naiad.triton_server.responses.stream import BeamRow, ResponseStream, StreamRow, Tensors


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
    tensors = _requested_tensors(request.outputs, len(prompt), chunk)
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
    outputs, prompt = stream.request.outputs, stream.request.rows[row.index].prompt_token_ids
    ids = prompt + chunk.token_ids if is_echoing else chunk.token_ids
    tensors: Tensors = {
        "output_ids": np.array([[ids]], dtype=np.int32),
        "sequence_length": _int32(len(ids)),
    }
    if outputs.num_return_sequences > 1:
        tensors["sequence_index"] = _int32(row.sequence_index)
    tensors |= detail_tensors(outputs, len(prompt), chunk)
    if stream.request.rows[row.index].text is not None:
        tensors |= _detokenizer_tensors(stream, row, chunk, is_echoing)
    return tensors


def _requested_tensors(outputs: RequestedOutputs, num_prompt_tokens: int, chunk: RequestOutput) -> Tensors:
    tensors: Tensors = {}
    if outputs.finish_reason:
        tensors["finish_reason"] = _string(chunk.finish_reason.value if chunk.finish_reason else "")
        tensors["stop_reason"] = _string(chunk.stop_reason)
    if outputs.num_input_tokens:
        tensors["num_input_tokens"] = _int32(num_prompt_tokens)
    if outputs.num_output_tokens:
        tensors["num_output_tokens"] = _int32(len(chunk.token_ids))
    if outputs.num_cached_tokens:
        tensors["num_cached_tokens"] = _int32(chunk.num_cached_tokens)
    return tensors | perf_tensors(outputs, chunk)


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


PADDING_ID = -1


def beam_tensors(stream: ResponseStream, row: BeamRow, is_echoing: bool) -> Tensors:
    """The tokens of k beams, n the most of one; with the prompt if it is echoed.

    Returns:
        output_ids [1, k, n] int32, filled up with −1; sequence_length [1, k] int32. With
        return_log_probs: output_log_probs [1, k, m] float32 of the m new tokens at most, filled up
        with 0, and cum_log_probs [1, k] float32, the scores. With return_num_output_tokens:
        num_output_tokens [1, 1] int32 of all of them. For a detokenizer: beam_max_chars [1, k]
        int32 and the tensors of a last chunk.
    """
    outputs, asked = stream.request.outputs, stream.request.rows[row.index]
    beams = row.in_order(outputs.num_return_sequences)
    prompt = asked.prompt_token_ids if is_echoing else []
    ids = [prompt + beam.token_ids for beam in beams]
    tensors: Tensors = {
        "output_ids": _padded(ids, PADDING_ID, np.int32),
        "sequence_length": _row_of([len(each) for each in ids], np.int32),
    }
    if outputs.log_probs:
        log_probs = [[each.log_prob for each in beam.log_probs] for beam in beams]
        tensors["output_log_probs"] = _padded(log_probs, 0.0, np.float32)
        tensors["cum_log_probs"] = _row_of([beam.cum_log_prob for beam in beams], np.float32)
    if outputs.num_output_tokens:
        tensors["num_output_tokens"] = _row_of([sum(len(beam.token_ids) for beam in beams)], np.int32)
    if asked.text is not None:
        # An echoed prompt begins each beam's ids; otherwise all texts stand behind the same window.
        window = [] if is_echoing else beams[0].window_ids
        num_prompt_chars = asked.text.num_prompt_chars if is_echoing else 0
        cuts = [num_prompt_chars + beam.num_chars if beam.is_cut else -1 for beam in beams]
        tensors |= {
            "sequence_id": _row_of([row.sequence_id], np.uint64),
            "window_ids": _row_of(window, np.int32),
            "num_emitted_tokens": _row_of([len(window)], np.int32),
            "max_chars": _row_of([-1], np.int32),
            "beam_max_chars": _row_of(cuts, np.int32),
            "is_last": _row_of([True], np.bool_),
        }
    return tensors


def _row_of(values: Sequence[float], kind: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.array([values], dtype=kind)


def _padded(
    rows: Sequence[Sequence[float]], padding: float, kind: type[np.generic]
) -> npt.NDArray[np.generic]:
    filled = np.full((1, len(rows), max(len(row) for row in rows)), padding, dtype=kind)
    for target, row in zip(filled[0], rows, strict=True):
        target[: len(row)] = row
    return filled


def detail_tensors(outputs: RequestedOutputs, num_prompt_tokens: int, chunk: RequestOutput) -> Tensors:
    """What was asked for of a chunk of n new tokens; V is the size of the vocabulary.

    Returns:
        With return_log_probs: output_log_probs [1, 1, n] and cum_log_probs [1, 1] float32. With
        num_log_probs = N: top_log_prob_ids int32 and top_log_probs float32 [1, n, N]. With
        return_generation_logits: generation_logits [1, 1, n, V] float32, if n > 0. With
        return_context_logits: context_logits [1, num_prompt_tokens, V] float32, on chunks that
        have them: a row's first and last.
    """
    tensors: Tensors = {}
    if outputs.log_probs:
        tensors["output_log_probs"] = _float32([each.log_prob for each in chunk.log_probs])[None, None]
        tensors["cum_log_probs"] = _float32([chunk.cum_log_prob])[None]
    if outputs.num_log_probs:
        shape = (1, len(chunk.log_probs), outputs.num_log_probs)
        ids = [each.top_token_ids for each in chunk.log_probs]
        values = [each.top_log_probs for each in chunk.log_probs]
        tensors["top_log_prob_ids"] = np.array(ids, dtype=np.int32).reshape(shape)
        tensors["top_log_probs"] = np.array(values, dtype=np.float32).reshape(shape)
    if outputs.generation_logits and chunk.generation_logits:
        logits = _logits(b"".join(chunk.generation_logits))
        tensors["generation_logits"] = logits.reshape(1, 1, len(chunk.generation_logits), -1)
    if outputs.context_logits and chunk.context_logits:
        tensors["context_logits"] = _logits(chunk.context_logits).reshape(1, num_prompt_tokens, -1)
    return tensors


def perf_tensors(outputs: RequestedOutputs, chunk: RequestOutput) -> Tensors:
    """Times, blocks and drafts until a chunk.

    Returns:
        With return_perf_metrics, `[1, 1]` each: arrival_time_ns, first_scheduled_time_ns,
        first_token_time_ns and last_token_time_ns int64, nanoseconds of the machine's monotonic
        clock, 0 = not yet; kv_cache_reused_blocks int32, those that were there, and, as the
        reference counts, kv_cache_alloc_total_blocks and kv_cache_alloc_new_blocks int32, both the
        others; total_draft_tokens and
        total_accepted_draft_tokens int32, acceptance_rate float32, the one over the other, 0
        without drafts. Without it the last three on the last chunk of a sequence that had drafts.
    """
    tensors: Tensors = {}
    if outputs.perf_metrics or (chunk.finish_reason is not None and chunk.num_draft_tokens):
        accepted, drafted = chunk.num_accepted_tokens, chunk.num_draft_tokens
        tensors["total_draft_tokens"] = np.array([[drafted]], dtype=np.int32)
        tensors["total_accepted_draft_tokens"] = np.array([[accepted]], dtype=np.int32)
        tensors["acceptance_rate"] = _float32([accepted / drafted if drafted else 0.0])[None]
    if outputs.perf_metrics:
        timings = chunk.timings or Timings()
        for name, seconds in (
            ("arrival", timings.arrival_s),
            ("first_scheduled", timings.first_scheduled_s),
            ("first_token", timings.first_token_s),
            ("last_token", timings.last_token_s),
        ):
            tensors[f"{name}_time_ns"] = np.array([[round(seconds * 1e9)]], dtype=np.int64)
        num_new = max(0, chunk.num_blocks - chunk.num_reused_blocks)
        for name, num in (
            ("alloc_total", num_new),
            ("alloc_new", num_new),
            ("reused", chunk.num_reused_blocks),
        ):
            tensors[f"kv_cache_{name}_blocks"] = np.array([[num]], dtype=np.int32)
    return tensors


def _float32(values: list[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def _logits(raw: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(raw, dtype="<f4")
