"""A model with windows in stages, and how a step is cut into micro-batches for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from helpers.runner_traffic import make_engine, traffic
from helpers.split_outputs import logits_of, token_ids
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner
from naiad.model_runner.device import resolve_device
from naiad.model_runner.ranks.micro_batches import micro_batches
from naiad.model_runner.sequence_states import SequenceState, StateRow
from naiad.outputs import StepRow
from naiad.sampling.row_state import new_row
from naiad.sequence import SamplingParams


def state_row(sequence_id: int, start: int, token_ids: list[int], drafts: tuple[int, ...] = ()) -> StateRow:
    state = SequenceState(new_row((), sequence_id, SamplingParams(max_tokens=1), 1), (0,))
    return StateRow(StepRow(sequence_id, start, token_ids, True, drafts), state)


def sizes(batches: list[list[StateRow]]) -> list[list[int]]:
    return [[row.num_scheduled_tokens for row, _ in batch] for batch in batches]


def test_a_long_row_is_cut_and_its_last_piece_samples() -> None:
    whole = state_row(1, 5, list(range(10, 50)), (7, 8))
    first, second = (batch[0].row for batch in micro_batches([whole], 2, 16))
    assert (first.start, first.token_ids, first.samples, first.draft_token_ids) == (
        5,
        list(range(10, 31)),
        False,
        (),
    )
    assert (second.start, second.token_ids, second.samples) == (26, list(range(31, 50)), True)
    assert second.draft_token_ids == (7, 8)


def test_few_tokens_are_one_batch_and_drafts_are_not_cut() -> None:
    assert sizes(micro_batches([state_row(1, 0, [1] * 31)], 2, 16)) == [[31]]
    rows = [state_row(number, 9, [1], (2,) * 7) for number in range(5)]
    assert sizes(micro_batches(rows, 2, 16)) == [[8, 8, 8], [8, 8]]
    assert sizes(micro_batches([state_row(1, 9, [1], (2,) * 40), state_row(2, 0, [3])], 2, 16)) == [[41], [1]]


def tokens_of(rows: list[StepRow]) -> list[tuple[int, int]]:
    return [(row.sequence_id, each) for row in rows for each in (*row.token_ids, *row.draft_token_ids)]


def test_batches_have_every_token_once_in_the_step_s_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        rows = [
            state_row(
                number,
                rng.randrange(9),
                [rng.randrange(90) for _ in range(rng.choice((1, 1, 3, 60)))],
                (5,) * rng.choice((0, 0, 4)),
            )
            for number in range(rng.randint(1, 9))
        ]
        max_batches = rng.randint(1, 5)
        batches = micro_batches(rows, max_batches, 8)
        assert 1 <= len(batches) <= max_batches
        pieces = [row for batch in batches for row, _ in batch]
        tokens = [
            (row.sequence_id, each) for row, _ in rows for each in [*row.token_ids, *row.draft_token_ids]
        ]
        made = [(row.sequence_id, each) for row in pieces for each in [*row.token_ids, *row.draft_token_ids]]
        assert made == tokens
        ends = {row.sequence_id: row.start for row, _ in rows}
        for piece in pieces:
            assert piece.start == ends[piece.sequence_id]
            ends[piece.sequence_id] = piece.end
        assert [row.samples for row in pieces].count(True) == len(rows)


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = EngineConfig(model_dir="m", device="cuda", tensor_parallel_size=2, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size = 3: expected 1 … 2: there are 5 GPUs"):
        resolve_device(config)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size = 6: expected 1 … 5, the number of GPUs"):
        resolve_device(replace(config, tensor_parallel_size=6))


@pytest.fixture(scope="module", params=[(1, 2), (1, 3), (2, 2)], ids="{0[0]} x {0[1]}".format)
def runners(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineConfig, ModelRunner, ModelRunner]]:
    """Seven layers, the sixth of which has no window: it is at the last stage, with others that have one."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tiny_model(folder, "Gemma3ForCausalLM")

    def config(parts: int, stages: int) -> EngineConfig:
        return EngineConfig(
            model_dir=str(folder),
            dtype="float32",
            cpu_kernels="torch",
            drafter="ngram",
            max_num_batched_tokens=48,
            max_num_seqs=6,
            block_size=16,
            # 14 blocks of the 7 layers.
            kv_cache_bytes=14 * 7 * 2 * 2 * 10 * 16 * 4,
            tensor_parallel_size=parts,
            pipeline_parallel_size=stages,
        )

    there = ModelRunner(config(*request.param))
    try:
        yield config(1, 1), ModelRunner(config(1, 1)), there
    finally:
        there.close()


def test_a_model_with_windows_makes_the_tokens_of_one_process(
    runners: tuple[EngineConfig, ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has no layer of the group without a window; all stages have the same block ids."""
    config, here, there = runners
    assert there.kv_groups == here.kv_groups
    assert there._followers is not None
    staged, num_batches = there._followers.staged, Counter[int]()
    assert staged is not None
    num_stages = staged.num_stages
    assert [len(group.layers) for group in there.model_config.layer_groups] == [0, 7 // num_stages]
    engine = make_engine(config, here, overlaps=False)
    expected = traffic(engine, 0)
    finish = staged.finish

    def counted() -> list[torch.Tensor]:
        results = finish()
        num_batches[len(results)] += 1
        return results

    monkeypatch.setattr(staged, "finish", counted)
    made = traffic(make_engine(config, there, overlaps=False), 0)
    assert made.keys() == expected.keys()
    for sequence_id, outputs in made.items():
        assert token_ids(outputs) == token_ids(expected[sequence_id])
        torch.testing.assert_close(logits_of(outputs), logits_of(expected[sequence_id]), rtol=0, atol=1e-4)
    assert num_batches.keys() == set(range(1, num_stages + 1))
    assert num_batches[num_stages] > 5
    stats = engine.stats()
    assert stats.total_hit_tokens > 0
    assert sum(stats.total_accepted_tokens_at) > 0
