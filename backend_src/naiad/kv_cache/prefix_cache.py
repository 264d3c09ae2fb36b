"""Which full blocks hold the KV of which tokens, so that it is computed once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BlockName = tuple[bytes, bytes]
"""A block's token bytes and its digest."""

_ROOT = b"naiad prefix cache, salt:"


def sha256(parent_digest: bytes, token_bytes: bytes) -> bytes:
    """The name of a block: of all tokens from the text's beginning to the block's end."""
    return hashlib.sha256(parent_digest + token_bytes).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block whose KV is known. Compared by identity.

    Attributes:
        block_id: where it lies.
        parent: the block before it; None for a text's first.
        salt: the tenant's; blocks of other tenants never match.
        token_bytes: the block's own ids, as 32-bit numbers.
        digest: names the block and all that is before it.
    """

    block_id: int
    parent: CachedBlock | None
    salt: str
    token_bytes: bytes
    digest: bytes


class PrefixCache:
    """A hash table of full blocks, each linked to the one before it.

    A digest finds a block; equality decides: the tokens, the tenant and the very block before it
    are compared, so that a collision of digests is a miss. A block whose parent was evicted is
    never found again.
    """

    def __init__(self, block_size: int, digest: Callable[[bytes, bytes], bytes] = sha256) -> None:
        """Know nothing.

        Args:
            block_size: tokens in a block.
            digest: digest of the parent and bytes of the tokens → the block's digest.
        """
        self._block_size = block_size
        self._digest = digest
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block_id: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        """How many blocks are known."""
        return len(self._by_block_id)

    def __contains__(self, block_id: int) -> bool:
        """Whether the block may be found."""
        return block_id in self._by_block_id

    def has(self, block: CachedBlock) -> bool:
        """Whether this very block may still be found: its place can have other tokens by now."""
        return self._by_block_id.get(block.block_id) is block

    def match(
        self, token_ids: Sequence[int], salt: str, max_tokens: int, names: list[BlockName] | None = None
    ) -> list[CachedBlock]:
        """The longest known beginning of a text, block by block.

        Args:
            token_ids: the text.
            salt: the tenant's.
            max_tokens: of the beginning, at most.
            names: of the text's first blocks as far as they are known; more are added. For those who
                ask about one text again and again.
        """
        names = [] if names is None else names
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for start in range(0, max_tokens - self._block_size + 1, self._block_size):
            if len(found) == len(names):
                names.append(self._name(parent, salt, token_ids, start))
            token_bytes, digest = names[len(found)]
            block = self._by_digest.get(digest)
            if block is None or not _is(block, parent, salt, token_bytes):
                break
            found.append(block)
            parent = block
        return found

    def insert(
        self, parent: CachedBlock | None, salt: str, token_ids: Sequence[int], start: int, block_id: int
    ) -> CachedBlock:
        """Make a full block known.

        Args:
            parent: what `match` or `insert` gave for the block before it; None for the first.
            salt: the tenant's.
            token_ids: of the whole text.
            start: of the block's first token.
            block_id: holds, or will hold when it is first read, the KV of those tokens.

        Returns:
            The block by which such tokens are found: another one with the same content, if that
            is known already.
        """
        token_bytes, digest = self._name(parent, salt, token_ids, start)
        known = self._by_digest.get(digest)
        if known is not None:
            if _is(known, parent, salt, token_bytes):
                return known
            self.evict(known.block_id)
        block = CachedBlock(block_id, parent, salt, token_bytes, digest)
        self._by_digest[digest] = block
        self._by_block_id[block_id] = block
        return block

    def evict(self, block_id: int) -> None:
        """Forget a block, if it is known."""
        block = self._by_block_id.pop(block_id, None)
        if block is not None:
            del self._by_digest[block.digest]

    def _name(self, parent: CachedBlock | None, salt: str, token_ids: Sequence[int], start: int) -> BlockName:
        token_bytes = array("I", token_ids[start : start + self._block_size]).tobytes()
        root = parent.digest if parent is not None else _ROOT + salt.encode()
        return token_bytes, self._digest(root, token_bytes)


def _is(block: CachedBlock, parent: CachedBlock | None, salt: str, token_bytes: bytes) -> bool:
    return block.parent is parent and block.token_bytes == token_bytes and block.salt == salt
