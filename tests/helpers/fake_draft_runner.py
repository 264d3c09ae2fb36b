"""A draft model's runner without a model: the fake model with occasional errors and failures."""

from __future__ import annotations

import random
from itertools import chain

from helpers.fake_runner import FakeRunner, next_token
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, StepBatch


class FakeDraftRunner(FakeRunner):
    """Stores ids like `FakeRunner`, so a draft that reads another text's KV fails an assertion.

    Attributes:
        num_passes: number of passes so far.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        target: FakeRunner | None,
        rng: random.Random,
        error_rate: float = 0.0,
        failure_rate: float = 0.0,
    ) -> None:
        """Make a runner.

        Args:
            kv_cache: the manager of its blocks.
            target: the runner to whose cache it writes; None: it has its own cache.
            rng: draws errors and failures.
            error_rate: fraction of tokens that are random.
            failure_rate: fraction of passes that raise, and of rows that fail.
        """
        super().__init__(kv_cache.groups[0].pool.num_blocks, kv_cache.block_size)
        self._has_own_kv = target is None
        if target is not None:
            self._slots, self._windows = target._slots, target._windows
        self._rng = rng
        self._error_rate = error_rate
        self._failure_rate = failure_rate
        self.num_passes = 0

    def run(self, step: StepBatch) -> ModelOutput:
        self.num_passes += 1
        if self._rng.random() < self._failure_rate:
            raise RuntimeError("the draft model has failed")
        self.failing = {row.sequence_id for row in step.rows if self._rng.random() < self._failure_rate}
        result = super().run(step) if self._has_own_kv else self._run_in_targets_cache(step)
        for sequence_id in result.sampled_token_ids:
            if self._rng.random() < self._error_rate:
                result.sampled_token_ids[sequence_id] = [self._rng.randrange(50)]
        return result

    def clear_slots(self, slots: list[list[int]]) -> None:
        for group, places in zip(self._slots, slots, strict=True):
            for slot in places:
                group.pop(slot, None)

    def _take(self, step: StepBatch) -> None:
        super()._take(step)
        for written in zip(*(self._slots_of(row) for row in step.rows), strict=True):
            slots = [*chain.from_iterable(written)]
            assert len(set(slots)) == len(slots), "two rows write one slot"

    def _run_in_targets_cache(self, step: StepBatch) -> ModelOutput:
        """Compute without reading the cache: the target's KV of the same step is not there yet."""
        self._take(step)
        result = ModelOutput({})
        for row in step.rows:
            self._write(row)
            result.sampled_token_ids[row.sequence_id] = [next_token(self._text(row))]
        return result
