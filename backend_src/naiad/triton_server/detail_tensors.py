"""Log-probabilities and logits of one chunk as output tensors.

They speak of new tokens only, also where `output_ids` holds the prompt too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from naiad.outputs import RequestOutput, Timings
from naiad.triton_server.output_wishes import OutputWishes
from naiad.triton_server.response_stream import Tensors


def detail_tensors(wishes: OutputWishes, num_prompt_tokens: int, chunk: RequestOutput) -> Tensors:
    """What was asked for of a chunk of n new tokens; V is the size of the vocabulary.

    Returns:
        With return_log_probs: output_log_probs [1, 1, n] and cum_log_probs [1, 1] float32. With
        num_log_probs = N: top_log_prob_ids int32 and top_log_probs float32 [1, n, N]. With
        return_generation_logits: generation_logits [1, 1, n, V] float32, if n > 0. With
        return_context_logits: context_logits [1, num_prompt_tokens, V] float32, on chunks that
        have them: a row's first and last.
    """
    tensors: Tensors = {}
    if wishes.log_probs:
        tensors["output_log_probs"] = _float32([each.log_prob for each in chunk.log_probs])[None, None]
        tensors["cum_log_probs"] = _float32([chunk.cum_log_prob])[None]
    if wishes.num_log_probs:
        shape = (1, len(chunk.log_probs), wishes.num_log_probs)
        ids = [each.top_token_ids for each in chunk.log_probs]
        values = [each.top_log_probs for each in chunk.log_probs]
        tensors["top_log_prob_ids"] = np.array(ids, dtype=np.int32).reshape(shape)
        tensors["top_log_probs"] = np.array(values, dtype=np.float32).reshape(shape)
    if wishes.generation_logits and chunk.generation_logits:
        logits = _logits(b"".join(chunk.generation_logits))
        tensors["generation_logits"] = logits.reshape(1, 1, len(chunk.generation_logits), -1)
    if wishes.context_logits and chunk.context_logits:
        tensors["context_logits"] = _logits(chunk.context_logits).reshape(1, num_prompt_tokens, -1)
    return tensors


def perf_tensors(wishes: OutputWishes, chunk: RequestOutput) -> Tensors:
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
    if wishes.perf_metrics or (chunk.finish_reason is not None and chunk.num_draft_tokens):
        accepted, drafted = chunk.num_accepted_tokens, chunk.num_draft_tokens
        tensors["total_draft_tokens"] = np.array([[drafted]], dtype=np.int32)
        tensors["total_accepted_draft_tokens"] = np.array([[accepted]], dtype=np.int32)
        tensors["acceptance_rate"] = _float32([accepted / drafted if drafted else 0.0])[None]
    if wishes.perf_metrics:
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
