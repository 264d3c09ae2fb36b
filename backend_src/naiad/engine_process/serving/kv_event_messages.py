"""Changes of the prefix cache as vLLM's KV events, in msgpack.

A batch is an array and an event a map with its name under `type`, as vLLM has them since its pull request
42892 (2026); earlier releases, and SGLang, write events as arrays. What Naiad has no value for is nil.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from naiad.kv_cache.cache_log import CacheChange, ChangeKind
from naiad.kv_cache.prefix_cache import CachedBlock
from naiad.sequence import PrefixIdentity

# Routers read "GPU" as "in the engine's own cache, ready to be used", and other media as slower ones.
MEDIUM = "GPU"
_HASH_BYTES = 8
_NO_SALT = PrefixIdentity()


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of a text are in the cache.

    Attributes:
        block_hashes: a hash for each block, which covers the text from its start to the block's end.
        parent_block_hash: the hash of the block before the first of them; None: they begin the text.
        token_ids: the blocks' tokens; empty if they are not published.
        block_size: tokens of a block.
        lora_id, lora_name: the adapter; None: none.
        medium: where the blocks are.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks are no longer in the cache."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty, or what it contains follows."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message.

    Attributes:
        ts: Unix time in seconds.
        events: in order.
        data_parallel_rank: an engine of Naiad is one replica, which is number 0 of its own.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


def block_hash(block: CachedBlock) -> int:
    """The last eight bytes of the block's digest as a number: the same after a restart and in every replica.

    The digest covers the salt, so blocks of different salts have different hashes.
    """
    return int.from_bytes(block.digest[-_HASH_BYTES:], "big")


def events_of(changes: Iterable[CacheChange], block_size: int, *, has_token_ids: bool) -> list[KVEvent]:
    """Make the events of these changes; neighbours that belong together become one event.

    Args:
        changes: in order.
        block_size: tokens of a block.
        has_token_ids: publish tokens, and only blocks without a salt. If not, publish all blocks.
    """
    events: list[KVEvent] = []
    last: CachedBlock | None = None
    for kind, block in changes:
        if has_token_ids and block.identity != _NO_SALT:
            continue
        event = events[-1] if events else None
        if kind is ChangeKind.REMOVED:
            if not isinstance(event, BlockRemoved):
                event = BlockRemoved([], MEDIUM)
                events.append(event)
        elif not isinstance(event, BlockStored) or block.parent is not last:
            parent_hash = None if block.parent is None else block_hash(block.parent)
            event = BlockStored([], parent_hash, [], block_size, None, MEDIUM, None)
            events.append(event)
        event.block_hashes.append(block_hash(block))
        if has_token_ids and isinstance(event, BlockStored):
            event.token_ids.extend(array("I", block.token_bytes))
        last = block
    return events
