"""Maps token prefixes to the full blocks that hold their KV, so that it is computed once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from naiad.sequence import PrefixIdentity

BlockName = tuple[bytes, bytes]
"""A block's token bytes and its digest."""

NO_BLOCK = -1
"""Stands in a block table where the group holds no block."""

_ROOT = b"naiad prefix cache, identity:"


def sha256(parent_digest: bytes, token_bytes: bytes) -> bytes:
    """The digest of a block: it covers all tokens from the start of the text to the block's end."""
    return hashlib.sha256(parent_digest + token_bytes).digest()


def first_block_in_window(num_tokens: int, window: int, block_size: int) -> int:
    """The index of the first block that a windowed layer reads for the token after `num_tokens` others."""
    return max(0, num_tokens + 1 - window) // block_size


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block of a text, with the blocks that hold its KV. Compared by identity.

    Attributes:
        block_ids: for each KV group, the block that holds the group's keys and values; `NO_BLOCK` if
            none does. A group with full attention has one as long as this entry is in the cache.
        parent: the block before it; None for the first block of a text.
        identity: the prefix identity; blocks of other identities never match.
        token_bytes: the block's own ids, as 32-bit numbers.
        digest: identifies the block and everything before it.
        num_children: number of entries in the cache whose parent is this one.
    """

    block_ids: list[int]
    parent: CachedBlock | None
    identity: PrefixIdentity
    token_bytes: bytes
    digest: bytes
    num_children: int = 0

    @property
    def is_useless(self) -> bool:
        """Whether no group holds its KV and no entry of the cache follows it."""
        return self.num_children == 0 and max(self.block_ids) == NO_BLOCK


class CacheObserver(Protocol):
    """Is told of every entry, by the engine's thread; such as `CacheLog`."""

    def stored(self, block: CachedBlock) -> None:
        """An entry is new."""

    def removed(self, block: CachedBlock) -> None:
        """An entry was dropped."""


class PrefixCache:
    """A hash table of full blocks, each linked to the one before it.

    A block is looked up by its digest, then the tokens, the identity and the preceding block are
    compared, so that a digest collision is a miss.

    An entry is dropped, and its successors can no longer be found, when a group with full attention
    allocates its block again. If every group has a window, an entry without any KV remains as long as
    another one follows it: only the last window before the end of a prefix needs KV.
    """

    def __init__(
        self,
        block_size: int,
        digest: Callable[[bytes, bytes], bytes] = sha256,
        windows: Sequence[int | None] = (None,),
        observer: CacheObserver | None = None,
    ) -> None:
        """Start empty.

        Args:
            block_size: tokens in a block.
            digest: computes a block's digest from its parent's digest and the bytes of its tokens.
            windows: for each KV group, its window in tokens; None: full attention.
            observer: is told of every entry that comes or goes.
        """
        self._block_size = block_size
        self._digest = digest
        self._observer = observer
        self.windows = tuple(windows)
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block_id: list[dict[int, CachedBlock]] = [{} for _ in windows]

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._by_digest)

    def holds(self, block_id: int, group: int = 0) -> bool:
        """Whether an entry refers to this block of a group."""
        return block_id in self._by_block_id[group]

    def held_ids(self, group: int) -> Iterable[int]:
        """The blocks of a group to which entries refer."""
        return self._by_block_id[group]

    def match(
        self,
        token_ids: Sequence[int],
        identity: PrefixIdentity,
        max_tokens: int,
        names: list[BlockName] | None = None,
    ) -> list[CachedBlock]:
        """Return the blocks of the longest prefix of a text that can be reused in every group.

        A group with full attention needs every block of the prefix, one with a window only those that
        cover the last window before the prefix's end.

        Args:
            token_ids: the text.
            identity: the text's prefix identity.
            max_tokens: maximum length of the prefix.
            names: the names of the text's first blocks as far as they have been computed; more are
                appended. For callers that look up the same text repeatedly.
        """
        names = [] if names is None else names
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for start in range(0, max_tokens - self._block_size + 1, self._block_size):
            if len(found) == len(names):
                names.append(self._name(parent, identity, token_ids, start))
            token_bytes, digest = names[len(found)]
            block = self._by_digest.get(digest)
            if block is None or not _is(block, parent, identity, token_bytes):
                break
            found.append(block)
            parent = block
        if self._windowed:
            del found[self._num_usable(found) :]
        return found

    def insert(
        self,
        parent: CachedBlock | None,
        identity: PrefixIdentity,
        token_ids: Sequence[int],
        start: int,
        block_ids: list[int],
    ) -> CachedBlock:
        """Add a full block.

        Args:
            parent: the entry that `match` or `insert` returned for the block before it; None for the
                first block.
            identity: the text's prefix identity.
            token_ids: the whole text.
            start: position of the block's first token.
            block_ids: for each group, the block that holds the KV of these tokens, or will hold it
                before it is read; `NO_BLOCK` if they are before the group's window. The cache keeps
                the list.

        Returns:
            The entry for these tokens. If there is one already, that is returned; groups that had no
            block for it get theirs from `block_ids`.
        """
        token_bytes, digest = self._name(parent, identity, token_ids, start)
        known = self._by_digest.get(digest)
        if known is not None:
            if _is(known, parent, identity, token_bytes):
                for group, _ in self._windowed:
                    if known.block_ids[group] == NO_BLOCK != block_ids[group]:
                        known.block_ids[group] = block_ids[group]
                        self._by_block_id[group][block_ids[group]] = known
                return known
            self._forget(known)
        block = CachedBlock(block_ids, parent, identity, token_bytes, digest)
        if block.is_useless:
            return block
        self._by_digest[digest] = block
        if parent is not None:
            parent.num_children += 1
        for by_block_id, block_id in zip(self._by_block_id, block_ids, strict=True):
            if block_id != NO_BLOCK:
                by_block_id[block_id] = block
        if self._observer is not None:
            self._observer.stored(block)
        return block

    def evict(self, block_id: int, group: int = 0) -> None:
        """Remove a group's block from the cache, if it is there; it will hold other tokens."""
        block = self._by_block_id[group].pop(block_id, None)
        if block is not None:
            block.block_ids[group] = NO_BLOCK
            if self.windows[group] is None or block.is_useless:
                self._forget(block)

    def _forget(self, forgotten: CachedBlock) -> None:
        """Drop an entry, and preceding ones without KV that were kept only because it followed them."""
        block: CachedBlock | None = forgotten
        while block is not None and self._by_digest.get(block.digest) is block:
            del self._by_digest[block.digest]
            if self._observer is not None:
                self._observer.removed(block)
            for group, block_id in enumerate(block.block_ids):
                if block_id != NO_BLOCK:
                    del self._by_block_id[group][block_id]
                    block.block_ids[group] = NO_BLOCK
            block = block.parent
            if block is not None:
                block.num_children -= 1
                if not block.is_useless:
                    break

    def _num_usable(self, found: list[CachedBlock]) -> int:
        """The length in blocks of the longest prefix whose last windows every windowed group holds."""
        num_blocks, is_settled = len(found), False
        while not is_settled:
            is_settled = True
            for group, window in self._windowed:
                first = first_block_in_window(num_blocks * self._block_size, window, self._block_size)
                for index in range(num_blocks - 1, first - 1, -1):
                    if found[index].block_ids[group] == NO_BLOCK:
                        # Every window that ends after this block and within the prefix needs it.
                        num_blocks, is_settled = index, False
                        break
        return num_blocks

    def _name(
        self, parent: CachedBlock | None, identity: PrefixIdentity, token_ids: Sequence[int], start: int
    ) -> BlockName:
        token_bytes = array("I", token_ids[start : start + self._block_size]).tobytes()
        root = parent.digest if parent is not None else _ROOT + msgspec.msgpack.encode(identity)
        return token_bytes, self._digest(root, token_bytes)


def _is(block: CachedBlock, parent: CachedBlock | None, identity: PrefixIdentity, token_bytes: bytes) -> bool:
    return block.parent is parent and block.token_bytes == token_bytes and block.identity == identity
