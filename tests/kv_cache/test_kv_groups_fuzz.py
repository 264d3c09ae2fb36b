"""Random operations on tiny pools of several KV groups, checked against a model of each slot's contents."""

from __future__ import annotations

import random

import pytest

from helpers.kv_checks import check_blocks
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import NO_BLOCK, PrefixCache, sha256
from naiad.sequence import KVRetention, PrefixIdentity, SamplingParams, Sequence

NUM_OPERATIONS = 250
LONGEST = 30
Text = tuple[PrefixIdentity, tuple[int, ...]]


def colliding(parent_digest: bytes, token_bytes: bytes) -> bytes:
    return sha256(parent_digest, token_bytes)[:1]


class Fuzz:
    """Sequences that are added, advance, fork, are preempted, fail and end.

    `contents` maps (group, block, offset) to the text whose last token's KV is there. The test fails
    unless every row finds the KV that its layers attend to.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice((1, 2, 3, 4))
        self.max_step_tokens = rng.choice((1, 3, 5, 8))
        self.windows = rng.choice(((None,), (None, 3), (None, 1, 6), (None, None, 4), (5,), (2, 9)))
        smallest = -(-LONGEST // self.block_size)
        specs = [KVGroupSpec(rng.randint(smallest, 2 * smallest), window) for window in self.windows]
        digest = rng.choice((sha256, sha256, colliding))
        prefix_cache = PrefixCache(self.block_size, digest, self.windows) if rng.random() < 0.9 else None
        self.now_s = 0.0
        self.cache = KVCacheManager(
            specs, self.block_size, prefix_cache, lambda: self.now_s, self.max_step_tokens
        )
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_sequences = 0
        self.contents: dict[tuple[int, int, int], Text] = {}

    def text(self, sequence: Sequence, position: int) -> Text:
        return sequence.prefix_identity, tuple(sequence.token_ids[: position + 1])

    def slot(self, sequence: Sequence, group: int, position: int) -> tuple[int, int, int]:
        block_id = sequence.block_tables[group][position // self.block_size]
        assert block_id != NO_BLOCK, "a block that is needed is not there"
        return group, block_id, position % self.block_size

    def make(self, token_ids: list[int]) -> Sequence:
        self.num_sequences += 1
        retention = None
        if self.rng.random() < 0.3:
            ranges = ((0, self.rng.randint(1, LONGEST), self.rng.choice((0, 35, 90)), 3.0),)
            retention = KVRetention(ranges=ranges, decode_priority=self.rng.choice((20, 35, 70)))
        params = SamplingParams(max_tokens=LONGEST)
        return Sequence(
            self.num_sequences,
            token_ids,
            len(token_ids),
            params,
            0.0,
            prefix_identity=PrefixIdentity(self.rng.choice(("", "", "a"))),
            retention=retention,
        )

    def come(self) -> None:
        """Add a sequence; there are few texts, so that many share prefixes."""
        token_ids = [self.rng.choice((1, 1, 1, 2)) for _ in range(self.rng.randint(1, LONGEST - 2))]
        self.waiting.append(self.make(token_ids))

    def admit(self) -> None:
        if not self.waiting:
            return
        sequence = self.rng.choice(self.waiting)
        num_spare_blocks = self.rng.choice((0, 0, 2))
        missing = self.cache.num_missing_blocks(sequence, num_spare_blocks)
        num_free = [group.pool.num_free for group in self.cache.groups]
        num_cached_tokens = self.cache.admit(sequence, num_spare_blocks)
        assert (num_cached_tokens is None) == (max(missing) > 0)
        if num_cached_tokens is None:
            assert num_free == [group.pool.num_free for group in self.cache.groups]
            assert num_spare_blocks or self.running, "a sequence alone does not fit"
            return
        assert num_cached_tokens < sequence.num_tokens
        sequence.num_computed_tokens = num_cached_tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def fork(self) -> None:
        donors = [each for each in self.running if each.num_computed_tokens]
        if not donors:
            return
        donor = self.rng.choice(donors)
        fewest = donor.num_computed_tokens - 1 if self.rng.random() < 0.7 else 0
        num_cached = self.rng.randint(fewest, donor.num_computed_tokens)
        sequence = self.make([*donor.token_ids[:num_cached], self.rng.choice((1, 2))])
        sequence.prefix_identity = donor.prefix_identity
        num_computed_tokens = self.cache.fork(sequence, donor)
        self.copy()
        if num_computed_tokens is not None:
            sequence.num_computed_tokens = num_computed_tokens
            self.running.append(sequence)

    def copy(self) -> None:
        for group, copies in enumerate(self.cache.take_copies()):
            for source, target in copies:
                for offset in range(self.block_size):
                    self.contents.pop((group, target, offset), None)
                    if (group, source, offset) in self.contents:
                        self.contents[group, target, offset] = self.contents[group, source, offset]

    def step(self) -> None:
        """Let some sequences compute tokens, perhaps with drafts; all KV is written before any is read."""
        rows: list[tuple[Sequence, int, list[int]]] = []
        for sequence in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(self.rng.choice((1, 1, 2)))
            sequence.next_start = sequence.num_computed_tokens
            if not self.cache.allocate(sequence, sequence.num_tokens):
                assert len(self.running) > 1, "a sequence alone does not fit"
                continue
            rows.append(self.row(sequence))
        for sequence, end, drafts in rows:
            self.write(sequence, end, drafts)
        for sequence, end, _ in rows:
            self.check_reads(sequence, end)
        for sequence, end, drafts in rows:
            sequence.num_computed_tokens = end
            if drafts:
                num_accepted = self.rng.randint(0, len(drafts))
                sequence.token_ids += drafts[:num_accepted]
                sequence.num_computed_tokens += num_accepted
                sequence.token_ids.append(1)
                self.cache.trim(sequence)
            self.cache.leave_window(sequence)
        self.running = [each for each in self.running if each.num_tokens < LONGEST or self.end(each)]

    def row(self, sequence: Sequence) -> tuple[Sequence, int, list[int]]:
        num_missing = sequence.num_tokens - sequence.num_computed_tokens
        num_tokens = self.rng.randint(1, min(num_missing, self.max_step_tokens))
        end = sequence.num_computed_tokens + num_tokens
        self.cache.publish(sequence, end)
        drafts: list[int] = []
        num_drafts = min(self.max_step_tokens - num_tokens, LONGEST - 1 - sequence.num_tokens)
        if end == sequence.num_tokens and num_drafts > 0 and self.rng.random() < 0.3:
            num_held = self.cache.extend(sequence, end + num_drafts) - end
            drafts = [self.rng.choice((1, 2)) for _ in range(min(num_drafts, num_held))]
        return sequence, end, drafts

    def write(self, sequence: Sequence, end: int, drafts: list[int]) -> None:
        text = [*sequence.token_ids[:end], *drafts]
        for group, table in enumerate(sequence.block_tables):
            held = sum(block_id != NO_BLOCK for block_id in table)
            most = self.cache.groups[group].max_held_blocks
            assert most is None or held <= most
            for position in range(sequence.num_computed_tokens, len(text)):
                slot = self.slot(sequence, group, position)
                self.contents[slot] = sequence.prefix_identity, tuple(text[: position + 1])

    def check_reads(self, sequence: Sequence, end: int) -> None:
        for group, window in enumerate(self.windows):
            first = max(0, sequence.num_computed_tokens + 1 - window) if window else 0
            for position in range(first, end):
                found = self.contents.get(self.slot(sequence, group, position))
                assert found == self.text(sequence, position), (group, position)

    def end(self, sequence: Sequence) -> bool:
        self.cache.free(sequence)
        return False

    def preempt(self) -> None:
        if self.running:
            sequence = self.running.pop(self.rng.randrange(len(self.running)))
            self.cache.free(sequence)
            sequence.num_computed_tokens = 0
            sequence.num_preemptions += 1
            self.waiting.append(sequence)

    def fail(self) -> None:
        """Let some sequences fail together: their own blocks are cleared, and lookups find none of them."""
        failed = self.rng.sample(self.running, self.rng.randint(0, min(2, len(self.running))))
        if not failed:
            return
        for group, block_ids in enumerate(self.cache.retract(failed)):
            for block_id in block_ids:
                for offset in range(self.block_size):
                    self.contents.pop((group, block_id, offset), None)
        for sequence in failed:
            self.cache.free(sequence)
            self.running.remove(sequence)

    def run(self) -> None:
        operations = [self.come, self.admit, self.admit, self.fork, self.preempt, self.fail]
        for _ in range(NUM_OPERATIONS):
            self.now_s += 0.5
            self.rng.choice([*operations, *[self.step] * 6])()
            num_written = {each.sequence_id: each.num_computed_tokens for each in self.running}
            check_blocks(self.cache, self.running, num_written)
        for sequence in [*self.running]:
            self.cache.free(sequence)
        assert self.cache.num_used_blocks == 0


@pytest.mark.parametrize("seed", range(40))
def test_every_row_finds_what_its_layers_see(seed: int) -> None:
    Fuzz(seed).run()
