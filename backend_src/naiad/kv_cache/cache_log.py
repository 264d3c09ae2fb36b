"""What changes among the blocks that lookups can find, for those who keep a copy of it elsewhere."""

from __future__ import annotations

from enum import Enum

from naiad.kv_cache.prefix_cache import CachedBlock


class ChangeKind(Enum):
    """What has happened to a block."""

    STORED = "stored"
    REMOVED = "removed"


CacheChange = tuple[ChangeKind, CachedBlock]


class CacheLog:
    """The changes since the last `take`, and the blocks that lookups can find now.

    An entry of the prefix cache whose predecessor was dropped cannot be found, though it remains until its
    own block is allocated again. So the log has it removed together with its predecessor, and what is added
    behind it never appears. Nothing is done but for changes, each in constant time for its block.

    A block's identity, tokens and digest never change, so another thread may read those of a change.
    """

    def __init__(self) -> None:
        """Start with an empty cache."""
        # Each findable block, predecessors first, with the findable blocks that follow it.
        self._next: dict[CachedBlock, dict[CachedBlock, None]] = {}
        self._changes: list[CacheChange] = []

    def stored(self, block: CachedBlock) -> None:
        """Note an entry that is new."""
        if block.parent is not None:
            siblings = self._next.get(block.parent)
            if siblings is None:
                return
            siblings[block] = None
        self._next[block] = {}
        self._changes.append((ChangeKind.STORED, block))

    def removed(self, block: CachedBlock) -> None:
        """Note an entry that was dropped; nothing happens if it could not be found."""
        if block not in self._next:
            return
        if block.parent is not None:
            del self._next[block.parent][block]
        gone = [block]
        for each in gone:
            gone += self._next.pop(each)
        self._changes += ((ChangeKind.REMOVED, each) for each in reversed(gone))

    def take(self) -> list[CacheChange]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def findable(self) -> list[CachedBlock]:
        """The blocks that lookups can find, each after its predecessor; O(blocks)."""
        return list(self._next)
