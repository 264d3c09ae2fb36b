"""Random requests, aborts and deadlines on tiny pools: everybody ends once, and rightly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from helpers.engine_drive import EngineDrive, solo_tokens
from naiad.sequence import FinishReason, SamplingParams


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    params: SamplingParams


class _Fuzz:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = self.rng.choice((1, 2, 4))
        self.drive = EngineDrive(
            num_blocks=self.rng.randint(4, 16),
            block_size=self.block_size,
            max_num_seqs=self.rng.randint(1, 8),
            budget=self.rng.choice((1, 2, 3, 5, 8, 16, 64)),
        )
        self.asked: dict[int, _Asked] = {}
        self.failed: set[int] = set()

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            roll = self.rng.random()
            if roll < 0.25:
                self._add()
            elif roll < 0.30 and self.asked:
                self.drive.abort(self.rng.choice(list(self.asked)))
            elif roll < 0.31 and self.asked:
                self.drive.runner.failing.add(self.rng.choice(list(self.asked)))
            else:
                self.drive.now += 0.1
                self.drive.step()
        self.drive.run()

    def _add(self) -> None:
        longest = self.drive.engine.max_model_len - 1
        prompt = [self.rng.randrange(50) for _ in range(self.rng.randint(1, longest))]
        stop_ids = tuple(self.rng.sample(range(50), 1)) if self.rng.random() < 0.5 else ()
        params = SamplingParams(max_tokens=self.rng.randint(1, 30), stop_token_ids=stop_ids)
        sequence_id = len(self.asked)
        self.asked[sequence_id] = _Asked(prompt, params)
        timeout_s = self.rng.uniform(0.0, 5.0) if self.rng.random() < 0.2 else None
        self.drive.add(sequence_id, prompt, params, timeout_s=timeout_s)

    def check(self) -> None:
        drive = self.drive
        assert drive.finals.keys() == self.asked.keys()
        assert drive.engine.stats().num_used_blocks == 0
        for sequence_id, asked in self.asked.items():
            self._check_tokens(sequence_id, asked)

    def _check_tokens(self, sequence_id: int, asked: _Asked) -> None:
        tokens, reason = self.drive.tokens[sequence_id], self.drive.reason(sequence_id)
        room = self.drive.engine.max_model_len - len(asked.prompt)
        most = min(asked.params.max_tokens, room)
        expected = solo_tokens(asked.prompt, most)
        stops = [index for index, token_id in enumerate(expected) if token_id in asked.params.stop_token_ids]
        if reason is FinishReason.STOP:
            assert tokens == expected[: stops[0]]
        elif reason is FinishReason.LENGTH:
            assert not stops
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]


def _fuzz(seeds: range, num_operations: int) -> int:
    num_preemptions = 0
    for seed in seeds:
        fuzz = _Fuzz(seed)
        fuzz.run(num_operations)
        fuzz.check()
        num_preemptions += fuzz.drive.engine.stats().total_preemptions
    return num_preemptions


def test_random_operations() -> None:
    assert _fuzz(range(400), 150) > 1_000


@pytest.mark.slow
def test_many_random_operations() -> None:
    assert _fuzz(range(1000, 2000), 600) > 10_000
