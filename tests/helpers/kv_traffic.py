"""Random sequences on a KV cache manager without an engine."""

from __future__ import annotations

import random

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.sequence import PrefixIdentity, SamplingParams, Sequence


class KVTraffic:
    """Random sequences over a few texts and salts, with preemption, failures and eviction."""

    def __init__(self, seed: int, cache: KVCacheManager, salts: tuple[str, ...] = ("", "", "a")) -> None:
        self.rng = random.Random(seed)
        self.cache = cache
        self.salts = salts
        self.running: list[Sequence] = []
        self.num_sequences = 0
        self.texts: set[tuple[str, tuple[int, ...]]] = set()

    def come(self) -> None:
        rng = self.rng
        token_ids = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 28))]
        identity = PrefixIdentity(rng.choice(self.salts))
        self.num_sequences += 1
        params = SamplingParams(max_tokens=30)
        sequence = Sequence(
            self.num_sequences, token_ids, len(token_ids), params, 0.0, prefix_identity=identity
        )
        self.admit(sequence)

    def admit(self, sequence: Sequence) -> None:
        num_cached_tokens = self.cache.admit(sequence)
        if num_cached_tokens is not None:
            sequence.num_computed_tokens = num_cached_tokens
            self.running.append(sequence)

    def step(self) -> None:
        for sequence in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(self.rng.choice((1, 1, 2)))
            sequence.next_start = sequence.num_computed_tokens
            if not self.cache.allocate(sequence, sequence.num_tokens):
                self.leave(sequence)
                continue
            end = min(sequence.num_computed_tokens + self.rng.randint(1, 8), sequence.num_tokens)
            self.cache.publish(sequence, end)
            self.texts.add((sequence.prefix_identity.salt, tuple(sequence.token_ids[:end])))
            sequence.num_computed_tokens = end
            self.cache.leave_window(sequence)
        for sequence in [each for each in self.running if each.num_tokens >= 30]:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.cache.free(sequence)
        self.running.remove(sequence)

    def end(self) -> None:
        if self.running:
            self.leave(self.rng.choice(self.running))

    def preempt(self) -> None:
        if self.running:
            sequence = self.rng.choice(self.running)
            self.leave(sequence)
            sequence.num_computed_tokens = 0
            sequence.num_preemptions += 1
            self.admit(sequence)

    def fail(self) -> None:
        failed = self.rng.sample(self.running, self.rng.randint(0, min(2, len(self.running))))
        self.cache.retract(failed)
        for sequence in failed:
            self.leave(sequence)

    def clear(self) -> None:
        """Let long texts that nobody shares take every block."""
        while self.running:
            self.leave(self.running[-1])
        group = self.cache.groups[0]
        length = group.pool.num_blocks * self.cache.block_size
        if group.window is None:
            self.num_sequences += 1
            token_ids = [100 + self.num_sequences] * length
            self.admit(Sequence(self.num_sequences, token_ids, length, SamplingParams(max_tokens=1), 0.0))
            self.end()

    def operate(self) -> None:
        often = [self.come] * 3 + [self.step] * 8
        self.rng.choice([*often, self.end, self.preempt, self.fail, self.step])()
        if self.rng.random() < 0.01:
            self.clear()
