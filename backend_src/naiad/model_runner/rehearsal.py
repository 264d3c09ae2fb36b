"""Steps that are computed before anybody waits: every kind there is, and the largest.

All tokens of all their sequences lie in block 0.
"""

from __future__ import annotations

from naiad.config import EngineConfig
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence
from naiad_kernels.paged_attention.device_step import distinct_query_lens
from naiad_kernels.paged_attention.layout import CacheLayout


def every_kind_of_step(layout: CacheLayout, max_model_len: int) -> list[SchedulerOutput]:
    """Together they launch every variant of the kernels that any step does.

    Args:
        layout: of the pool.
        max_model_len: of a sequence, at most.
    """
    drawing = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    # As long as can be: a context that is read in one piece does not need its parts merged.
    sequence = _in_block_0(0, [0] * max_model_len, layout.block_size, drawing)
    return [
        SchedulerOutput([ScheduledSequence(sequence, max_model_len - length, length, samples=True)])
        for length in distinct_query_lens(layout)
        if length <= max_model_len
    ]


def largest_steps(config: EngineConfig, num_tokens: int, max_model_len: int) -> list[SchedulerOutput]:
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
        sequence = _in_block_0(begin, [0] * max_model_len, config.block_size, asking)
        prompts.append(ScheduledSequence(sequence, max_model_len - length, length, samples=True))
    drafts = (0,) * min(config.num_speculative_tokens, max_model_len - 1)
    drawing = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    known = [0] * (max_model_len - len(drafts))
    texts = [
        ScheduledSequence(
            _in_block_0(index, known, config.block_size, drawing),
            start=len(known) - 1,
            num_scheduled_tokens=1 + len(drafts),
            samples=True,
            draft_token_ids=drafts,
        )
        for index in range(max(1, min(config.max_num_seqs, num_tokens // (1 + len(drafts)))))
    ]
    return [SchedulerOutput(prompts), SchedulerOutput(texts)]


def _in_block_0(sequence_id: int, token_ids: list[int], block_size: int, params: SamplingParams) -> Sequence:
    # Drafts lie behind the known tokens.
    num_blocks = -(-len(token_ids) // block_size) + 1
    return Sequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=params,
        arrival_s=0.0,
        block_table=[0] * num_blocks,
    )
