"""Many sequences that fill the pool: all advance, and little is computed twice."""

from __future__ import annotations

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import SamplingParams

NUM_SEQUENCES = 24
PROMPT_TOKENS, NEW_TOKENS = 6, 60


def storm(prefix_cache: PrefixCache | None, num_blocks: int) -> EngineDrive:
    drive = EngineDrive(
        num_blocks=num_blocks, block_size=4, max_num_seqs=16, budget=32, prefix_cache=prefix_cache
    )
    for number in range(NUM_SEQUENCES):
        drive.add(number, [number] * PROMPT_TOKENS, SamplingParams(max_tokens=NEW_TOKENS))
    drive.run(max_steps=20_000)
    expected = {n: solo_tokens([n] * PROMPT_TOKENS, NEW_TOKENS) for n in range(NUM_SEQUENCES)}
    assert drive.tokens == expected
    return drive


@pytest.mark.parametrize("num_blocks", [17, 20, 34, 60])
@pytest.mark.parametrize("is_cached", [True, False])
def test_recomputing_is_bounded(num_blocks: int, is_cached: bool) -> None:
    drive = storm(PrefixCache(4) if is_cached else None, num_blocks)
    stats = drive.engine.stats()
    assert stats.total_preemptions > 0
    num_computed = sum(num_tokens for step in drive.runner.steps for _, num_tokens in step)
    # The last token of each is never computed.
    num_needed = NUM_SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS - 1)
    longest = PROMPT_TOKENS + NEW_TOKENS
    assert num_computed <= num_needed + stats.total_preemptions * longest
    assert num_computed < 2.5 * num_needed


def test_some_sequence_gets_a_token_in_every_few_steps() -> None:
    drive = EngineDrive(num_blocks=17, block_size=4, max_num_seqs=16, budget=8)
    for number in range(NUM_SEQUENCES):
        drive.add(number, [number] * PROMPT_TOKENS, SamplingParams(max_tokens=NEW_TOKENS))
    num_idle_steps = 0
    while drive.engine.has_work:
        has_token = any(output.token_ids for output in drive.step())
        num_idle_steps = 0 if has_token else num_idle_steps + 1
        assert num_idle_steps < 20
