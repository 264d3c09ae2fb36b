"""Finds the first of several strings in a text that arrives in pieces (Aho and Corasick, 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar
from weakref import WeakValueDictionary


class StopStrings:
    """What is known of some strings before any text is read; all sequences of a request share it.

    A node represents a prefix of some string.

    Attributes:
        children: node → character → the node of the longer prefix.
        depths: node → its prefix's length.
        fallbacks: node → the longest other prefix with which its own ends.
        longest_matches: node → the longest of the strings with which its prefix ends.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], StopStrings]] = WeakValueDictionary()

    def __init__(self, strings: Iterable[str]) -> None:
        """Build the nodes, at most as many as the strings have characters."""
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.fallbacks = [0]
        self.longest_matches: list[str | None] = [None]
        for string in strings:
            assert string, "an empty stop string would match everywhere"
            self._add(string)
        self._link()

    @classmethod
    def of(cls, strings: Iterable[str]) -> StopStrings:
        """Return what is known of these strings, built only if no matcher has it already."""
        key = tuple(strings)
        known = cls._shared.get(key)
        if known is None:
            known = cls._shared[key] = cls(key)
        return known

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            child = self.children[node].get(char)
            if child is None:
                child = len(self.children)
                self.children[node][char] = child
                self.children.append({})
                self.depths.append(self.depths[node] + 1)
                self.fallbacks.append(0)
                self.longest_matches.append(None)
            node = child
        self.longest_matches[node] = string

    def _link(self) -> None:
        """Set each node's fallback: the longest other prefix with which its own string ends."""
        queue = deque(self.children[0].values())
        while queue:
            parent = queue.popleft()
            for char, child in self.children[parent].items():
                node = self.fallbacks[parent]
                while node and char not in self.children[node]:
                    node = self.fallbacks[node]
                self.fallbacks[child] = self.children[node].get(char, 0)
                if self.longest_matches[child] is None:
                    self.longest_matches[child] = self.longest_matches[self.fallbacks[child]]
                queue.append(child)


class StopMatcher:
    """Reads text once, at amortized O(1) for each character, independent of the strings.

    The current node is the longest prefix that the text read so far ends with.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Begin before a text."""
        self._strings = StopStrings.of(strings)
        self._node = 0

    @property
    def num_open_chars(self) -> int:
        """Number of trailing characters that may be the beginning of one of the strings."""
        return self._strings.depths[self._node]

    def feed(self, text: str) -> tuple[int, str | None]:
        """Read `text` up to the first match.

        Returns:
            The number of characters read and the string that ends with the last of them (the
            longest of several), or all of them and None.
        """
        strings, node = self._strings, self._node
        for index, char in enumerate(text):
            while node and char not in strings.children[node]:
                node = strings.fallbacks[node]
            node = strings.children[node].get(char, 0)
            match = strings.longest_matches[node]
            if match is not None:
                self._node = node
                return index + 1, match
        self._node = node
        return len(text), None
