"""What goes into a parser, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from naiad.outputs import TokenLogProbs


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token, or text without one.

    Attributes:
        text: the characters that it completes.
        token_id: the token; None: characters that were left over at the end.
        log_probs: the token's log-probabilities, if they were asked for.
    """

    text: str
    token_id: int | None = None
    log_probs: TokenLogProbs | None = None


@dataclass(frozen=True, slots=True)
class ContentPlace:
    """A place in content.

    Attributes:
        num_chars, num_tokens: how much comes before it.
    """

    num_chars: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of content that no call interrupts; the attributes are those of `ParsedDelta`."""

    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[TokenLogProbs]


class Placed(Protocol):
    """A call, or what is new of one."""

    @property
    def after(self) -> ContentPlace:
        """How much of the content comes before it."""


Call = TypeVar("Call", bound=Placed)


def in_order(
    text: str, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs], calls: Iterable[Call]
) -> Iterator[ContentPart | Call]:
    """Yield content and the calls that interrupt it, in the order in which they came."""
    begin = ContentPlace()
    for call in calls:
        if call.after != begin:
            yield _between(text, token_ids, log_probs, begin, call.after)
            begin = call.after
        yield call
    end = ContentPlace(len(text), len(token_ids))
    if begin != end:
        yield _between(text, token_ids, log_probs, begin, end)


def _between(
    text: str,
    token_ids: Sequence[int],
    log_probs: Sequence[TokenLogProbs],
    begin: ContentPlace,
    end: ContentPlace,
) -> ContentPart:
    tokens = slice(begin.num_tokens, end.num_tokens)
    return ContentPart(text[begin.num_chars : end.num_chars], token_ids[tokens], log_probs[tokens])


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a tool call: first its name, then its arguments.

    Attributes:
        index: the number of the call in its output, from 0.
        call_id: the call's id, in its first delta alone.
        name: the tool's name, in the same delta.
        arguments: new text of the arguments, which are a JSON object.
        after: what of the delta's content comes before it.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    after: ContentPlace = ContentPlace()


@dataclass(slots=True)
class ParsedDelta:
    """What a delta adds to each part of an output.

    Attributes:
        reasoning: new text of the reasoning.
        content: new text of the content.
        content_ids: the content's new tokens.
        content_log_probs: one for each of `content_ids`, if they were asked for.
        num_reasoning_tokens: new tokens of the reasoning, marks included.
        calls: what is new of tool calls.
        has_open_call: a call whose name has been reported, or that has begun under a grammar, is not
            complete. Known at the end.
    """

    reasoning: str = ""
    content: str = ""
    content_ids: list[int] = field(default_factory=list)
    content_log_probs: list[TokenLogProbs] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    calls: list[CallDelta] = field(default_factory=list)
    has_open_call: bool = False

    @property
    def content_place(self) -> ContentPlace:
        """The end of the content so far."""
        return ContentPlace(len(self.content), len(self.content_ids))

    def in_order(self) -> Iterator[ContentPart | CallDelta]:
        """Yield content and what is new of calls, in the order in which they came."""
        return in_order(self.content, self.content_ids, self.content_log_probs, self.calls)

    def add_content_token(self, piece: Piece) -> None:
        """Count a piece's token to the content."""
        if piece.token_id is not None:
            self.content_ids.append(piece.token_id)
        if piece.log_probs is not None:
            self.content_log_probs.append(piece.log_probs)
