"""Steps that are computed before anybody waits: every kind there is, and the largest.

All tokens of all their sequences lie in block 0.
"""

from __future__ import annotations

from naiad.config import EngineConfig
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams
from naiad_kernels.paged_attention.device_step import distinct_query_lens
from naiad_kernels.paged_attention.layout import CacheLayout


def every_kind_of_step(layout: CacheLayout, max_model_len: int) -> list[StepBatch]:
    """Together they launch every variant of the kernels that any step does.

    Args:
        layout: of the pool.
        max_model_len: of a sequence, at most.
    """
    drawing = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    # As long as can be: a context that is read in one piece does not need its parts merged.
    table = _in_block_0(max_model_len, layout.block_size)
    return [
        lone_step([LoneRow(0, [0] * max_model_len, max_model_len - length, table, drawing)])
        for length in distinct_query_lens(layout)
        if length <= max_model_len
    ]


def largest_steps(config: EngineConfig, num_tokens: int, max_model_len: int) -> list[StepBatch]:
    """Two: the ends of prompts whose logits are asked for; as many long texts with drafts as may run.

    Args:
        config: says how many sequences may run, with how many drafts.
        num_tokens: of a step, at most.
        max_model_len: of a sequence, at most.
    """
    asking = SamplingParams(max_tokens=1, returns_context_logits=True)
    prompts = []
    for begin in range(0, num_tokens, max_model_len):
        length = min(max_model_len, num_tokens - begin)
        table = _in_block_0(max_model_len, config.block_size)
        prompts.append(LoneRow(begin, [0] * max_model_len, max_model_len - length, table, asking))
    drafts = (0,) * min(config.num_speculative_tokens, max_model_len - 1)
    drawing = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    known = [0] * (max_model_len - len(drafts))
    texts = [
        LoneRow(
            index,
            known,
            len(known) - 1,
            _in_block_0(max_model_len, config.block_size),
            drawing,
            draft_token_ids=drafts,
        )
        for index in range(max(1, min(config.max_num_seqs, num_tokens // (1 + len(drafts)))))
    ]
    return [lone_step(prompts), lone_step(texts)]


def _in_block_0(num_tokens: int, block_size: int) -> list[int]:
    """A block table for so many tokens, all in one block."""
    return [0] * -(-num_tokens // block_size)
