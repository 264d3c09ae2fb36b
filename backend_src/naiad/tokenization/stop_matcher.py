"""Finds the first of several strings in a text that arrives in pieces (Aho and Corasick, 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Reads text once, at amortized O(1) for each character, independent of the strings.

    A node represents a prefix of some string. The current node is the longest prefix that the
    text read so far ends with.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Build the nodes, at most as many as the strings have characters."""
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._longest_match: list[str | None] = [None]
        self._node = 0
        for string in strings:
            assert string, "an empty stop string would match everywhere"
            self._add(string)
        self._link()

    @property
    def num_open_chars(self) -> int:
        """Number of trailing characters that may be the beginning of one of the strings."""
        return self._depth[self._node]

    def feed(self, text: str) -> tuple[int, str | None]:
        """Read `text` up to the first match.

        Returns:
            The number of characters read and the string that ends with the last of them (the
            longest of several), or all of them and None.
        """
        node = self._node
        for index, char in enumerate(text):
            while node and char not in self._children[node]:
                node = self._fallback[node]
            node = self._children[node].get(char, 0)
            match = self._longest_match[node]
            if match is not None:
                self._node = node
                return index + 1, match
        self._node = node
        return len(text), None

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            child = self._children[node].get(char)
            if child is None:
                child = len(self._children)
                self._children[node][char] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._longest_match.append(None)
            node = child
        self._longest_match[node] = string

    def _link(self) -> None:
        """Set each node's fallback: the longest other prefix with which its own string ends."""
        queue = deque(self._children[0].values())
        while queue:
            parent = queue.popleft()
            for char, child in self._children[parent].items():
                node = self._fallback[parent]
                while node and char not in self._children[node]:
                    node = self._fallback[node]
                self._fallback[child] = self._children[node].get(char, 0)
                if self._longest_match[child] is None:
                    self._longest_match[child] = self._longest_match[self._fallback[child]]
                queue.append(child)
