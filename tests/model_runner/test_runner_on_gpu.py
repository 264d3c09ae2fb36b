from __future__ import annotations

import random
from pathlib import Path

import pytest

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import SamplingParams, Sequence

pytestmark = pytest.mark.gpu

BLOCK = 16


def random_step(chance: random.Random, runner: ModelRunner) -> SchedulerOutput:
    """Sequences of any length, with and without drafts, drawn from or not, in blocks of their own."""
    free = list(range(runner.num_blocks))
    rows = []
    for index in range(chance.randint(1, 12)):
        num_drafts = chance.choice([0, 0, 3, 8])
        length = chance.randint(1, 200)
        num_scheduled = chance.choice([1, 1, length])
        sequence = Sequence(
            sequence_id=index,
            token_ids=[chance.randrange(90) for _ in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(
                max_tokens=1,
                temperature=chance.choice([0.0, 0.7]),
                top_p=chance.choice([1.0, 0.9]),
                top_k=chance.choice([0, 5]),
                repetition_penalty=chance.choice([1.0, 1.2]),
            ),
            arrival_s=0.0,
            block_table=[free.pop() for _ in range(-(-(length + num_drafts) // BLOCK))],
        )
        drafts = tuple(chance.randrange(90) for _ in range(num_drafts))
        start = length - num_scheduled
        rows.append(ScheduledSequence(sequence, start, num_scheduled + num_drafts, True, drafts))
    return SchedulerOutput(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_step_after_the_start_compiles_anything(tmp_path: Path, dtype: str) -> None:
    make_tiny_model(tmp_path, hidden_size=96, head_dim=16, num_attention_heads=6, num_key_value_heads=2)
    config = EngineConfig(
        model_dir=str(tmp_path), device="cuda", dtype=dtype, block_size=BLOCK, kv_cache_bytes=1 << 26
    )
    runner = ModelRunner(config)
    chance = random.Random(0)
    for _ in range(50):
        assert runner.run(random_step(chance, runner)).errors == {}
    assert runner.num_late_compiles == 0
