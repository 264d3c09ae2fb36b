"""Which full blocks hold the KV of which tokens, so that it is computed once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from naiad.sequence import PrefixIdentity

BlockName = tuple[bytes, bytes]
"""A block's token bytes and its digest."""

NO_BLOCK = -1
"""In place of a block id: the group holds no block there."""

_ROOT = b"naiad prefix cache, identity:"


def sha256(parent_digest: bytes, token_bytes: bytes) -> bytes:
    """The name of a block: of all tokens from the text's beginning to the block's end."""
    return hashlib.sha256(parent_digest + token_bytes).digest()


def first_block_in_window(num_tokens: int, window: int, block_size: int) -> int:
    """The first block that a layer with a window reads for the token after `num_tokens` others."""
    return max(0, num_tokens + 1 - window) // block_size


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block of a text whose KV is known. Compared by identity.

    Attributes:
        block_ids: for each KV group, the block that holds the group's keys and values; `NO_BLOCK` if
            none does. A group with full attention always has one while the block can be found.
        parent: the block before it; None for a text's first.
        identity: blocks of another identity never match.
        token_bytes: the block's own ids, as 32-bit numbers.
        digest: names the block and all that is before it.
        num_children: blocks that can be found and have this one as their parent.
    """

    block_ids: list[int]
    parent: CachedBlock | None
    identity: PrefixIdentity
    token_bytes: bytes
    digest: bytes
    num_children: int = 0

    @property
    def is_useless(self) -> bool:
        """Whether it has no KV, and nothing that can be found follows it."""
        return self.num_children == 0 and max(self.block_ids) == NO_BLOCK


class PrefixCache:
    """A hash table of full blocks, each linked to the one before it.

    A digest finds a block; equality decides: the tokens, the identity and the very block before it
    are compared, so that a collision of digests is a miss.

    A block is forgotten, and what follows it can no longer be found, when a group with full attention
    gives its block to other tokens. If every group has a window, a block is remembered without any KV
    as long as another one follows it: only the last window before a prefix's end needs KV.
    """

    def __init__(
        self,
        block_size: int,
        digest: Callable[[bytes, bytes], bytes] = sha256,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """Know nothing.

        Args:
            block_size: tokens in a block.
            digest: digest of the parent and bytes of the tokens → the block's digest.
            windows: for each KV group, the tokens its layers see; None: all.
        """
        self._block_size = block_size
        self._digest = digest
        self.windows = tuple(windows)
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block_id: list[dict[int, CachedBlock]] = [{} for _ in windows]

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self._by_digest)

    def holds(self, block_id: int, group: int = 0) -> bool:
        """Whether this block of a group may be found."""
        return block_id in self._by_block_id[group]

    def match(
        self,
        token_ids: Sequence[int],
        identity: PrefixIdentity,
        max_tokens: int,
        names: list[BlockName] | None = None,
    ) -> list[CachedBlock]:
        """The longest prefix of a text that every group has, block by block.

        A group with full attention needs every block of it, one with a window only those that
        cover the last window before the prefix's end.

        Args:
            token_ids: the text.
            identity: the text's.
            max_tokens: of the prefix, at most.
            names: of the text's first blocks as far as they are known; more are added. For callers
                that ask about one text again and again.
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
        """Make a full block known.

        Args:
            parent: what `match` or `insert` gave for the block before it; None for the first.
            identity: the text's.
            token_ids: of the whole text.
            start: of the block's first token.
            block_ids: for each group, the block that holds, or will hold when it is first read, the
                KV of those tokens; `NO_BLOCK` where a window has left them behind. The cache keeps
                the list.

        Returns:
            The block by which such tokens are found: one with the same content, if that is known
            already. It takes over the blocks of groups that had none for it.
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
        return block

    def evict(self, block_id: int, group: int = 0) -> None:
        """A group's block gets other tokens: it is no longer found, if it could be."""
        block = self._by_block_id[group].pop(block_id, None)
        if block is not None:
            block.block_ids[group] = NO_BLOCK
            if self.windows[group] is None or block.is_useless:
                self._forget(block)

    def _forget(self, forgotten: CachedBlock) -> None:
        """Drop a block, and those before it that were remembered only because it followed."""
        block: CachedBlock | None = forgotten
        while block is not None and self._by_digest.get(block.digest) is block:
            del self._by_digest[block.digest]
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
        """Of a prefix whose blocks are known, how many every group with a window can start after."""
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
