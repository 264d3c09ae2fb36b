"""Steps that are computed at startup, before requests wait: every kind of step, and the largest ones.

All tokens of all their sequences are in block 0.
"""

from __future__ import annotations

from collections.abc import Collection

from naiad.config import EngineConfig
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams
from naiad_kernels.paged_attention.device_step import distinct_query_lens
from naiad_kernels.paged_attention.layout import CacheLayout


def every_kind_of_step(
    layout: CacheLayout, max_model_len: int, product_rows: Collection[int] = ()
) -> list[StepBatch]:
    """Make steps that together launch every kernel variant that any step uses.

    Args:
        layout: the pool's layout.
        max_model_len: maximum length of a sequence.
        product_rows: numbers of tokens that together launch every variant of the products, the head's
            included; none if they are a library's.
    """
    # With a prompt's logits the head multiplies as many tokens as the other layers, up to those of a part.
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, returns_context_logits=bool(product_rows)
    )
    # The context is as long as possible: one that is not split does not launch the merge of its parts.
    table = _in_block_0(max_model_len, layout.block_size)
    return [
        lone_step([LoneRow(0, [0] * max_model_len, max_model_len - length, table, params)])
        for length in sorted({*distinct_query_lens(layout), *product_rows})
        if length <= max_model_len
    ]


def largest_steps(config: EngineConfig, num_tokens: int, max_model_len: int) -> list[StepBatch]:
    """Make two steps: ends of prompts whose logits are needed, and as many long texts with drafts as may run.

    Args:
        config: the limits on sequences and drafts.
        num_tokens: maximum number of tokens in a step.
        max_model_len: maximum length of a sequence.
    """
    asking = SamplingParams(max_tokens=1, returns_context_logits=True, num_prompt_log_probs=1)
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
    """A block table for this many tokens, all in one block."""
    return [0] * -(-num_tokens // block_size)
