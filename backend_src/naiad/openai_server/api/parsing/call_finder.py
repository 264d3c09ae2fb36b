"""Finds the tool calls in the content of an output, as it comes."""

from __future__ import annotations

import secrets
import string
from collections import deque
from dataclasses import dataclass, field, replace

from naiad.openai_server.api.parsing.call_forms import Tools, read_calls
from naiad.openai_server.api.parsing.cursor import BrokenError, Cursor, Reading
from naiad.openai_server.api.parsing.families import CallFamily
from naiad.openai_server.api.parsing.pieces import CallDelta, ParsedDelta, Piece

# Of a call that is held back until it is complete; longer ones are content.
MAX_HELD_CHARS = 128 * 1024
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls of an output are reported, and how.

    Attributes:
        family: how calls are written.
        tools: the tools that may be called; a call of another one is content.
        max_calls: further calls are left out; None: there is no limit.
        are_certain: a call that has begun can not turn out to be none, because a grammar holds for it: its
            arguments are reported as they come. Otherwise a call is held back until it is complete.
    """

    family: CallFamily
    tools: Tools = field(default_factory=dict)
    max_calls: int | None = None
    are_certain: bool = False


class CallFinder:
    """Divides content into text and calls. The result does not depend on how it is divided into deltas."""

    def __init__(self, rules: CallRules) -> None:
        """Begin before the first character of the content."""
        self._rules = rules
        self._cursor = Cursor()
        self._parsed = ParsedDelta()
        # The place up to which it is decided what is content and what is a call; the text behind it is kept.
        self._decided = 0
        self._pieces: deque[_PlacedPiece] = deque()  # those that end behind it
        self._is_blank = True  # since the beginning, or since the last call, there was only white space
        self._num_calls = 0
        self._call = _OpenCall()
        self._has_open_call = False  # one that was shown, or is certain to have begun, was not completed
        self._work = self._find()

    def take(self, piece: Piece, parsed: ParsedDelta) -> None:
        """Take what follows; what it decides is added to `parsed`."""
        self._pieces.append(_PlacedPiece(piece, self._cursor.end))
        self._cursor.push(piece.text)
        self._go_on(parsed)

    def finish(self, parsed: ParsedDelta) -> None:
        """Decide what is left, as nothing follows."""
        self._cursor.is_ended = True
        self._go_on(parsed)
        parsed.has_open_call = self._has_open_call

    @property
    def tools(self) -> Tools:
        """See `CallSink`."""
        return self._rules.tools

    def name(self, name: str) -> None:
        """See `CallSink`."""
        if name not in self.tools:
            raise BrokenError
        self._call.name = name

    def begin_arguments(self) -> None:
        """See `CallSink`."""
        self._call.begin = self._cursor.at
        if self._rules.are_certain and self._call.name:
            self._report_name()
            self._call.is_growing = True
            self._decide(self._cursor.at, is_content=False)
            self._cursor.limit = None

    def end_arguments(self) -> None:
        """See `CallSink`."""
        self._report_grown()
        self._call.is_growing = False
        self._call.arguments = self._cursor.between(self._call.begin, self._cursor.at)

    def end(self, arguments: str | None = None) -> None:
        """See `CallSink`."""
        if not self._call.is_reported:
            self._report_name()
            self._report(CallDelta(self._num_calls, arguments=arguments or self._call.arguments or "{}"))
        self._num_calls += 1
        self._call = _OpenCall()
        self._is_blank = True
        self._decide(self._cursor.at, is_content=False)
        self._cursor.limit = self._decided + MAX_HELD_CHARS

    def _go_on(self, parsed: ParsedDelta) -> None:
        self._parsed = parsed
        next(self._work, None)
        self._report_grown()

    def _find(self) -> Reading[None]:
        """Read the whole content."""
        if self._rules.family.bare and (yield from self._begins_bare()):
            yield from self._read_calls()
        while (yield from self._seek_mark()):
            yield from self._read_calls()

    def _begins_bare(self) -> Reading[bool]:
        yield from self._cursor.space()
        return (yield from self._cursor.peek()) == self._rules.family.bare

    def _seek_mark(self) -> Reading[bool]:
        """Read content up to a mark that begins calls, and the mark; False: there is none."""
        cursor, marks = self._cursor, self._rules.family.begins
        while True:
            rest = cursor.rest
            found = min(((place, mark) for mark in marks if (place := rest.find(mark)) >= 0), default=None)
            if found is not None:
                self._say(cursor.at + found[0])
                # The bracket of a list belongs to the list.
                cursor.at += len(found[1].removesuffix("["))
                return True
            if cursor.is_ended:
                self._say(cursor.end)
                self._say_rest()
                return False
            self._say(cursor.end - max((len(end_that_begins(rest, mark)) for mark in marks), default=0))
            yield

    def _read_calls(self) -> Reading[None]:
        self._cursor.limit = self._decided + MAX_HELD_CHARS
        try:
            yield from read_calls(self._rules.family, self._cursor, self)
            # The mark that ends them.
            self._decide(self._cursor.at, is_content=False)
        except BrokenError:
            self._report_grown()
            is_cut = self._rules.are_certain and self._cursor.is_ended
            self._has_open_call |= (self._call.is_reported or is_cut) and self._is_shown(self._num_calls)
            self._num_calls += self._call.is_reported
            self._call = _OpenCall()
            self._is_blank = False
            self._say(self._cursor.at)
        self._cursor.limit = None

    def _say(self, place: int) -> None:
        """What comes before a place is content; white space alone waits for what follows."""
        cursor = self._cursor
        is_blank = self._is_blank and not cursor.between(cursor.at, place).strip()
        cursor.at = place
        if not is_blank:
            self._is_blank = False
            self._parsed.content += cursor.between(self._decided, place)
            self._decide(place, is_content=True)

    def _say_rest(self) -> None:
        """White space at the end is content if it is all that there is."""
        self._is_blank &= self._num_calls > 0
        self._say(self._cursor.at)
        self._decide(self._cursor.at, is_content=False)

    def _decide(self, place: int, *, is_content: bool) -> None:
        """Decide the text before a place. A token belongs to the content if some of its text does."""
        while self._pieces and self._pieces[0].is_before(place):
            first = self._pieces[0]
            if is_content and not first.is_content:
                first.is_content = True
                self._parsed.add_content_token(first.piece)
            if first.end > place:
                break
            self._pieces.popleft()
        self._decided = place
        self._cursor.forget(place)

    def _report_name(self) -> None:
        self._call.is_reported = True
        call_id = new_call_id(is_short=self._rules.family.has_short_ids)
        self._report(CallDelta(self._num_calls, call_id, self._call.name))

    def _report_grown(self) -> None:
        """Report the arguments that have been read since the last time, if they are reported as they come."""
        place = self._cursor.at
        if self._call.is_growing and place > self._decided:
            self._report(CallDelta(self._num_calls, arguments=self._cursor.between(self._decided, place)))
            self._decide(place, is_content=False)

    def _report(self, delta: CallDelta) -> None:
        if self._is_shown(delta.index):
            self._parsed.calls.append(replace(delta, after=self._parsed.content_place))

    def _is_shown(self, index: int) -> bool:
        return self._rules.max_calls is None or index < self._rules.max_calls


@dataclass(slots=True)
class _OpenCall:
    """A call that is being read.

    Attributes:
        name: its name, once it is known.
        begin: where its arguments begin.
        arguments: the arguments, once they are complete.
        is_reported: its name has been reported.
        is_growing: its arguments are reported as they come.
    """

    name: str = ""
    begin: int = 0
    arguments: str = ""
    is_reported: bool = False
    is_growing: bool = False


@dataclass(slots=True)
class _PlacedPiece:
    """A piece, and the place where it begins."""

    piece: Piece
    begin: int
    is_content: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.piece.text)

    def is_before(self, place: int) -> bool:
        """Whether it ends, or at least begins, before a place."""
        return self.begin < place or self.end == place


def new_call_id(*, is_short: bool) -> str:
    """A random id."""
    letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(9 if is_short else 24))
    return letters if is_short else f"call_{letters}"


def end_that_begins(text: str, mark: str) -> str:
    """The longest end of the text with which the mark begins."""
    most = min(len(text), len(mark) - 1)
    return next((mark[:size] for size in range(most, 0, -1) if text.endswith(mark[:size])), "")
