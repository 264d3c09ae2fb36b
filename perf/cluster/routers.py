"""Policies by which a router chooses a replica, from what real routers know of their replicas."""

from __future__ import annotations

import bisect
import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence

from naiad.kv_cache.cache_log import CacheChange, ChangeKind
from naiad.kv_cache.prefix_cache import CachedBlock

_VIRTUAL_NODES = 64


class Router:
    """Knows which replicas are alive, and how many requests each of them has from here.

    Attributes:
        alive: the replicas that answer, in order.
        num_open: for each replica, the requests that it has and that have not ended.
        total_open: their sum.
        wants_changes: whether `take_changes` has to be called.
    """

    wants_changes = False

    def __init__(self, num_replicas: int, seed: int, block_size: int) -> None:
        """Start with all replicas alive.

        Args:
            num_replicas: how many there are.
            seed: of random choices.
            block_size: tokens of a replica's block.
        """
        self.alive = list(range(num_replicas))
        self.num_open = [0] * num_replicas
        self.total_open = 0
        self.draw = random.Random(seed)
        self.block_size = block_size

    def choose(self, prompt: Sequence[int]) -> int:
        """Choose among the replicas that are alive; there is at least one."""
        raise NotImplementedError

    def send(self, replica: int) -> None:
        """A replica gets a request."""
        self.num_open[replica] += 1
        self.total_open += 1

    def end(self, replica: int) -> None:
        """A replica's request has ended."""
        self.num_open[replica] -= 1
        self.total_open -= 1

    def leave(self, replica: int) -> None:
        """A replica does not answer any more; its requests are over."""
        self.alive.remove(replica)
        self.total_open -= self.num_open[replica]
        self.num_open[replica] = 0

    def join(self, replica: int) -> None:
        """A replica is back, with an empty cache."""
        bisect.insort(self.alive, replica)

    def take_changes(self, replica: int, changes: Iterable[CacheChange]) -> None:
        """Learn what a replica's prefix cache has got and lost."""

    def less_busy_of_two(self) -> int:
        """The one with fewer open requests of two that are picked at random."""
        picked = self.draw.choice(self.alive), self.draw.choice(self.alive)
        return min(picked, key=lambda each: (self.num_open[each], each))


class RoundRobin(Router):
    """One after the other."""

    _last = -1

    def choose(self, prompt: Sequence[int]) -> int:
        """The next one alive."""
        place = bisect.bisect_right(self.alive, self._last) % len(self.alive)
        self._last = self.alive[place]
        return self._last


class RandomChoice(Router):
    """Any of them."""

    def choose(self, prompt: Sequence[int]) -> int:
        """A random one."""
        return self.draw.choice(self.alive)


class LeastRequest(Router):
    """The better of two, as Envoy's `LEAST_REQUEST` does it (Mitzenmacher, 2001)."""

    def choose(self, prompt: Sequence[int]) -> int:
        """One with few open requests."""
        return self.less_busy_of_two()


class PrefixHash(Router):
    """Consistent hashing of a prompt's beginning, with bounded loads (Mirrokni et al., SODA 2018).

    Each replica has places on a ring. A prompt belongs to the first place after the hash of its beginning
    whose replica is alive and has at most `load_bound` times the mean number of open requests.
    """

    num_prefix_tokens = 128
    load_bound = 1.25

    def __init__(self, num_replicas: int, seed: int, block_size: int) -> None:
        """Place the replicas."""
        super().__init__(num_replicas, seed, block_size)
        places = [
            (_ring_hash(f"{replica} {node}".encode()), replica)
            for replica in range(num_replicas)
            for node in range(_VIRTUAL_NODES)
        ]
        self._ring = sorted(places)
        self._is_alive = [True] * num_replicas

    def choose(self, prompt: Sequence[int]) -> int:
        """The one that the beginning belongs to."""
        start = bisect.bisect(self._ring, (_ring_hash(_token_bytes(prompt[: self.num_prefix_tokens])), -1))
        most = self.load_bound * (1 + self.total_open) / len(self.alive)
        for step in range(len(self._ring)):
            replica = self._ring[(start + step) % len(self._ring)][1]
            if self._is_alive[replica] and self.num_open[replica] < most:
                return replica
        return self.less_busy_of_two()

    def leave(self, replica: int) -> None:
        """Its prompts belong to the next ones on the ring."""
        super().leave(replica)
        self._is_alive[replica] = False

    def join(self, replica: int) -> None:
        """Its prompts are its own again."""
        super().join(replica)
        self._is_alive[replica] = True


class CacheAware(Router):
    """The one that has most of the prompt in its cache, by KV events, unless it is too busy.

    A replica that has less than `least_share` of a prompt does not count as having it. One that has more than
    `most_ahead` open requests more than another, which is picked at random, is passed over.
    """

    wants_changes = True
    least_share = 0.1
    most_ahead = 8

    def __init__(self, num_replicas: int, seed: int, block_size: int) -> None:
        """Start knowing nothing."""
        super().__init__(num_replicas, seed, block_size)
        self._holders: dict[bytes, set[int]] = {}
        self._keys: list[dict[CachedBlock, bytes]] = [{} for _ in range(num_replicas)]

    def choose(self, prompt: Sequence[int]) -> int:
        """One with as much of the prompt as any, or a less busy one."""
        best, num_blocks = self._best(prompt)
        other = self.less_busy_of_two()
        if not best or num_blocks * self.block_size < self.least_share * len(prompt):
            return other
        replica = min(best, key=lambda each: (self.num_open[each], each))
        return other if self.num_open[replica] - self.num_open[other] > self.most_ahead else replica

    def leave(self, replica: int) -> None:
        """Forget its cache."""
        super().leave(replica)
        for key in self._keys[replica].values():
            self._drop(key, replica)
        self._keys[replica] = {}

    def take_changes(self, replica: int, changes: Iterable[CacheChange]) -> None:
        """Keep the index of who has which block."""
        keys = self._keys[replica]
        for kind, block in changes:
            if kind is ChangeKind.STORED:
                key = _block_key(b"" if block.parent is None else keys[block.parent], block.token_bytes)
                keys[block] = key
                self._holders.setdefault(key, set()).add(replica)
            else:
                self._drop(keys.pop(block), replica)

    def num_known_blocks(self, replica: int) -> int:
        """How many blocks a replica is known to have."""
        return len(self._keys[replica])

    def _best(self, prompt: Sequence[int]) -> tuple[set[int], int]:
        """The replicas with the longest beginning of a prompt, and its length in blocks."""
        best: set[int] = set()
        key, num_blocks = b"", 0
        for start in range(0, len(prompt) - self.block_size + 1, self.block_size):
            key = _block_key(key, _token_bytes(prompt[start : start + self.block_size]))
            holders = self._holders.get(key, set())
            further = best & holders if num_blocks else holders
            if not further:
                break
            best, num_blocks = further, num_blocks + 1
        return best, num_blocks

    def _drop(self, key: bytes, replica: int) -> None:
        holders = self._holders[key]
        holders.discard(replica)
        if not holders:
            del self._holders[key]


POLICIES: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_request": LeastRequest,
    "prefix_hash": PrefixHash,
    "cache_aware": CacheAware,
}


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _ring_hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _block_key(parent: bytes, token_bytes: bytes) -> bytes:
    return hashlib.blake2b(parent + token_bytes, digest_size=16).digest()
