"""The tensors of a response other than its ids and text; the ensemble's steps pass them on to the client.

A response has a batch dimension of 1. Log-probabilities and logits cover new tokens only, even if the
prompt is echoed. `output_tensors.RESPONSE_TENSORS` documents when each tensor is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.frontend.chunks import Chunk
from naiad.triton_server.responses.stream import Tensors


def detail_tensors(chunk: Chunk) -> Tensors:
    """Return the requested outputs of a chunk and the indices of its row and sequence.

    Returns:
        finish_reason and stop_reason [1, 1] strings; num_input_tokens, num_output_tokens,
        num_cached_tokens, batch_index and sequence_index [1, 1] int32; and the tensors of `_perf_tensors`,
        `_log_prob_tensors`, `_beam_score_tensors` and `_logit_tensors`.
    """
    requested = chunk.request.outputs
    tensors = _count_tensors(chunk)
    if requested.perf_metrics or (chunk.is_last and chunk.asks_for_drafts):
        tensors |= _perf_tensors(chunk)
    if requested.beam_width > 1:
        if requested.log_probs:
            tensors |= _beam_score_tensors(chunk)
    else:
        if requested.num_return_sequences > 1:
            tensors["sequence_index"] = int32_tensor(chunk.sequence_index)
        if requested.log_probs or requested.num_log_probs:
            tensors |= _log_prob_tensors(chunk)
        if requested.generation_logits or requested.context_logits:
            tensors |= _logit_tensors(chunk)
    if len(chunk.request.rows) > 1:
        tensors["batch_index"] = int32_tensor(chunk.row_index)
    return tensors


def _count_tensors(chunk: Chunk) -> Tensors:
    """Return the finish reason and the numbers of tokens."""
    requested = chunk.request.outputs
    tensors: Tensors = {}
    if requested.finish_reason:
        reason = chunk.finish_reason
        tensors["finish_reason"] = string_tensor("" if reason is None else reason.value)
        tensors["stop_reason"] = string_tensor(chunk.first.stop_reason)
    if requested.num_input_tokens:
        tensors["num_input_tokens"] = int32_tensor(len(chunk.prompt_token_ids))
    if requested.num_output_tokens:
        tensors["num_output_tokens"] = int32_tensor(chunk.num_new_tokens)
    if requested.num_cached_tokens:
        tensors["num_cached_tokens"] = int32_tensor(chunk.first.num_cached_tokens)
    return tensors


def int32_tensor(value: int) -> npt.NDArray[np.int32]:
    """Return a tensor [1, 1]."""
    return np.array([[value]], dtype=np.int32)


def string_tensor(value: str) -> npt.NDArray[Any]:
    """Return a tensor [1, 1]."""
    return np.array([[value.encode()]], dtype=np.object_)


def padded(
    rows: Sequence[Sequence[float]], padding: float, kind: type[np.generic]
) -> npt.NDArray[np.generic]:
    """Return a tensor [1, rows, longest], padded with `padding`."""
    filled = np.full((1, len(rows), max(len(row) for row in rows)), padding, dtype=kind)
    for target, row in zip(filled[0], rows, strict=True):
        target[: len(row)] = row
    return filled


def _perf_tensors(chunk: Chunk) -> Tensors:
    """Return timings and the numbers of blocks and draft tokens up to this chunk.

    Returns:
        `[1, 1]` each: total_draft_tokens and total_accepted_draft_tokens int32, acceptance_rate
        float32. With return_perf_metrics also arrival_time_ns, first_scheduled_time_ns,
        first_token_time_ns and last_token_time_ns int64, and kv_cache_reused_blocks,
        kv_cache_alloc_new_blocks and kv_cache_alloc_total_blocks int32; the last two are equal, as in
        TensorRT-LLM's backend.
    """
    perf = chunk.perf_metrics
    tensors: Tensors = {
        "total_draft_tokens": int32_tensor(perf.num_draft_tokens),
        "total_accepted_draft_tokens": int32_tensor(perf.num_accepted_tokens),
        "acceptance_rate": np.array([[perf.acceptance_rate]], dtype=np.float32),
    }
    if chunk.request.outputs.perf_metrics:
        for name, time_ns in (
            ("arrival_time_ns", perf.arrival_time_ns),
            ("first_scheduled_time_ns", perf.first_scheduled_time_ns),
            ("first_token_time_ns", perf.first_token_time_ns),
            ("last_token_time_ns", perf.last_token_time_ns),
        ):
            tensors[name] = np.array([[time_ns]], dtype=np.int64)
        tensors["kv_cache_alloc_total_blocks"] = int32_tensor(perf.num_new_blocks)
        tensors["kv_cache_alloc_new_blocks"] = int32_tensor(perf.num_new_blocks)
        tensors["kv_cache_reused_blocks"] = int32_tensor(perf.num_reused_blocks)
    return tensors


def _log_prob_tensors(chunk: Chunk) -> Tensors:
    """Return the log-probabilities of n new tokens.

    Returns:
        With return_log_probs: output_log_probs [1, 1, n] and cum_log_probs [1, 1] float32. With
        num_log_probs = N: top_log_prob_ids int32 and top_log_probs float32 [1, n, N].
    """
    requested, log_probs = chunk.request.outputs, chunk.first.log_probs
    tensors: Tensors = {}
    if requested.log_probs:
        tensors["output_log_probs"] = np.array([[[each.log_prob for each in log_probs]]], dtype=np.float32)
        tensors["cum_log_probs"] = np.array([[chunk.first.cum_log_prob]], dtype=np.float32)
    if requested.num_log_probs:
        shape = (1, len(log_probs), requested.num_log_probs)
        ids = [each.top_token_ids for each in log_probs]
        values = [each.top_log_probs for each in log_probs]
        tensors["top_log_prob_ids"] = np.array(ids, dtype=np.int32).reshape(shape)
        tensors["top_log_probs"] = np.array(values, dtype=np.float32).reshape(shape)
    return tensors


def _beam_score_tensors(chunk: Chunk) -> Tensors:
    """Return the log-probabilities and scores of k beams.

    Returns:
        output_log_probs [1, k, m] float32, where m is the number of new tokens of the longest beam, padded
        with 0, and cum_log_probs [1, k] float32, the scores.
    """
    log_probs = [[each.log_prob for each in beam.log_probs] for beam in chunk.outputs]
    scores = [beam.cum_log_prob for beam in chunk.outputs]
    return {
        "output_log_probs": padded(log_probs, 0.0, np.float32),
        "cum_log_probs": np.array([scores], dtype=np.float32),
    }


def _logit_tensors(chunk: Chunk) -> Tensors:
    """Return logits over a vocabulary of V ids.

    Returns:
        With return_generation_logits: generation_logits [1, 1, n, V] float32 of n > 0 new tokens.
        With return_context_logits: context_logits [1, prompt tokens, V] float32, on a row's first and last
        chunk.
    """
    requested, output = chunk.request.outputs, chunk.first
    tensors: Tensors = {}
    if requested.generation_logits and output.generation_logits:
        logits = _float32s(b"".join(output.generation_logits))
        tensors["generation_logits"] = logits.reshape(1, 1, len(output.generation_logits), -1)
    if requested.context_logits and output.context_logits:
        logits = _float32s(output.context_logits)
        tensors["context_logits"] = logits.reshape(1, len(chunk.prompt_token_ids), -1)
    return tensors


def _float32s(raw: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(raw, dtype="<f4")
