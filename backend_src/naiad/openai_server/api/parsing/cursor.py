"""Reads text that comes bit by bit.

What reads is a generator: it yields when it needs more text than there is, and goes on when more has come.
So a reader is written as if all of the text were there, and what it finds can not depend on how the text is
divided.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

Found = TypeVar("Found")
# A reader; it yields to ask for more text.
Reading = Generator[None, None, Found]

_SPACE = re.compile(r"[ \t\r\n]*")


class BrokenError(Exception):
    """The text is not what it has begun to be."""


class Cursor:
    """A place in a text that grows. Places are counted from the text's beginning."""

    def __init__(self) -> None:
        """Begin before the first character."""
        self._text = ""
        self._origin = 0  # the place of the first character that is kept
        self.at = 0
        self.is_ended = False
        self.limit: int | None = None

    @property
    def end(self) -> int:
        """The place behind the last character that has come."""
        return self._origin + len(self._text)

    @property
    def rest(self) -> str:
        """The text from here on."""
        return self._text[self.at - self._origin :]

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._text += text

    def between(self, begin: int, end: int) -> str:
        """The text between two places, as far as it has not been forgotten."""
        return self._text[max(0, begin - self._origin) : max(0, end - self._origin)]

    def forget(self, place: int) -> None:
        """Forget the text before a place."""
        self._text = self._text[place - self._origin :]
        self._origin = place

    def peek(self) -> Reading[str]:
        """The next character; "" at the end.

        Raises:
            BrokenError: the limit is reached.
        """
        while True:
            if self.limit is not None and self.at >= self.limit:
                raise BrokenError
            if self.at < self.end:
                return self._text[self.at - self._origin]
            if self.is_ended:
                return ""
            yield

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as many characters as match.

        Args:
            pattern: matches any number of characters, each for itself.
        """
        found: list[str] = []
        while (yield from self.peek()):
            last = self.end if self.limit is None else min(self.end, self.limit)
            match = pattern.match(self._text, self.at - self._origin, last - self._origin)
            if match is None or not match[0]:
                break
            found.append(match[0])
            self.at += len(match[0])
        return "".join(found)

    def space(self) -> Reading[None]:
        """Read white space, if there is any."""
        yield from self.run(_SPACE)

    def sees(self, literal: str) -> Reading[bool]:
        """Read this text if it is next; else nothing."""
        begin = self.at
        for character in literal:
            if (yield from self.peek()) != character:
                self.at = begin
                return False
            self.at += 1
        return True

    def sees_after_space(self, literal: str) -> Reading[bool]:
        """Read white space and this text if they are next; else nothing."""
        begin = self.at
        yield from self.space()
        if (yield from self.sees(literal)):
            return True
        self.at = begin
        return False

    def pass_mark(self, mark: str) -> Reading[None]:
        """Read white space and a mark if they are next, or as much of them as there is before the end."""
        begin = self.at
        yield from self.space()
        if not (yield from self.sees(mark)):
            is_cut = self.is_ended and mark.startswith(self.rest)
            self.at = self.end if is_cut else begin

    def expect(self, literal: str) -> Reading[None]:
        """Read this text.

        Raises:
            BrokenError: it is not next.
        """
        if not (yield from self.sees(literal)):
            raise BrokenError

    def until(self, mark: str) -> Reading[str]:
        """Read up to a mark and the mark; return what is before it.

        Raises:
            BrokenError: the mark does not come.
        """
        begin = self.at
        while True:
            place = self._text.find(mark, self.at - self._origin)
            last = self.end if self.limit is None else min(self.end, self.limit)
            if place >= 0 and self._origin + place + len(mark) <= last:
                self.at = self._origin + place + len(mark)
                return self.between(begin, self.at - len(mark))
            # The mark may have begun.
            self.at = max(self.at, last - len(mark) + 1)
            if self.is_ended or last == self.limit:
                self.at = last
                raise BrokenError
            yield
