"""Takes a model's output apart: what it reasons, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from naiad.outputs import TokenLogProbs


class Section(Enum):
    """A part of an output."""

    OPEN = "nothing but white space yet: it may begin to reason, or to speak"
    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an output between two marks, which belong to neither neighbour."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of a family write their outputs.

    Attributes:
        name: the family's name.
        reasoning: encloses what comes before the content.
    """

    name: str
    reasoning: Span


FAMILIES = (
    Family("think", Span("<think>", "</think>")),
    Family("mistral", Span("[THINK]", "[/THINK]")),
)
# How to choose a family: by the checkpoint, none, or one by its name.
CHOICES = ("auto", "none", *(family.name for family in FAMILIES))


class Vocabulary(Protocol):
    """What is asked of a checkpoint's tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The template's source."""

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """How one checkpoint writes its outputs.

    Attributes:
        family: its family.
        marks: id → text, of the marks that are single tokens; they may be special and then have no text.
    """

    family: Family
    marks: Mapping[int, str] = field(default_factory=dict)

    def section_after(self, prompt: str) -> Section:
        """The section in which the output begins.

        Args:
            prompt: the end of the prompt's text, special tokens included.
        """
        span, text = self.family.reasoning, prompt.rstrip()
        if text.endswith(span.begin):
            return Section.REASONING
        return Section.CONTENT if text.endswith(span.end) else Section.OPEN

    def section_within(self, content: str) -> Section:
        """The section in which the output goes on with a message that has begun.

        Args:
            content: what the message holds so far.
        """
        span = self.family.reasoning
        return Section.REASONING if content.rfind(span.begin) > content.rfind(span.end) else Section.CONTENT


def grammar_of(vocabulary: Vocabulary, choice: str = "auto") -> OutputGrammar | None:
    """Return the grammar of a checkpoint; None if it is not known to reason.

    A family's marks are in the chat template of its models, or they are tokens of their own.

    Args:
        vocabulary: the checkpoint's.
        choice: one of CHOICES.
    """
    for family in FAMILIES:
        span = family.reasoning
        ids = {mark: vocabulary.token_id(mark) for mark in (span.begin, span.end)}
        is_found = span.end in (vocabulary.chat_template or "") or None not in ids.values()
        if family.name == choice or (choice == "auto" and is_found):
            return OutputGrammar(family, {each: mark for mark, each in ids.items() if each is not None})
    return None


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


@dataclass(slots=True)
class ParsedDelta:
    """What a delta adds to each part of an output.

    Attributes:
        reasoning: new text of the reasoning.
        content: new text of the content.
        content_ids: the content's new tokens.
        content_log_probs: one for each of `content_ids`, if they were asked for.
        num_reasoning_tokens: new tokens of the reasoning, marks included.
    """

    reasoning: str = ""
    content: str = ""
    content_ids: list[int] = field(default_factory=list)
    content_log_probs: list[TokenLogProbs] = field(default_factory=list)
    num_reasoning_tokens: int = 0


class OutputParser:
    """Parses the output of one sequence as it comes. The result does not depend on how it is divided."""

    def __init__(self, grammar: OutputGrammar, begins_in: Section = Section.OPEN) -> None:
        """Start before the first token, in this section."""
        self._span = grammar.family.reasoning
        self._marks = grammar.marks
        self._section = begins_in
        self._pending: list[Piece] = []  # while the section is OPEN
        self._held = ""  # text that may begin the mark that is due

    @property
    def has_only_content_left(self) -> bool:
        """Whether all that follows is content."""
        return self._section is Section.CONTENT

    def parse_delta(self, pieces: Sequence[Piece], *, finished: bool) -> ParsedDelta:
        """Parse what is new.

        Args:
            pieces: the new tokens with their text, in order.
            finished: nothing follows; what was held back is decided.
        """
        parsed = ParsedDelta()
        for piece in pieces:
            self._take(self._with_mark(piece), parsed)
        if finished:
            if self._section is Section.REASONING:
                parsed.reasoning += self._held
            self._speak(parsed)
        return parsed

    def _with_mark(self, piece: Piece) -> Piece:
        """The piece with the text of the mark that is due, if it is a special token, which has none."""
        if piece.text or piece.token_id is None or self._section is Section.CONTENT:
            return piece
        due = self._span.end if self._section is Section.REASONING else self._span.begin
        is_due = self._marks.get(piece.token_id) == due
        return Piece(due, piece.token_id, piece.log_probs) if is_due else piece

    def _take(self, piece: Piece, parsed: ParsedDelta) -> None:
        match self._section:
            case Section.OPEN:
                self._begin(piece, parsed)
            case Section.REASONING:
                self._reason(piece, parsed)
            case Section.CONTENT:
                _add_content(piece, parsed)

    def _begin(self, piece: Piece, parsed: ParsedDelta) -> None:
        self._pending.append(piece)
        self._held = (self._held + piece.text).lstrip()
        mark, rest = self._span.begin, self._held.removeprefix(self._span.begin)
        if self._held.startswith(mark):
            parsed.num_reasoning_tokens += sum(map(_num_tokens, self._pending[:-1]))
            self._pending.clear()
            self._held = ""
            self._section = Section.REASONING
            self._reason(Piece(rest, piece.token_id, piece.log_probs), parsed)
        elif not mark.startswith(self._held):
            self._speak(parsed)

    def _speak(self, parsed: ParsedDelta) -> None:
        """Begin the content with what is pending."""
        self._section, self._held = Section.CONTENT, ""
        for piece in self._pending:
            _add_content(piece, parsed)
        self._pending.clear()

    def _reason(self, piece: Piece, parsed: ParsedDelta) -> None:
        reasoning, mark, content = (self._held + piece.text).partition(self._span.end)
        self._held = "" if mark else _end_that_begins(reasoning, self._span.end)
        parsed.reasoning += reasoning[: len(reasoning) - len(self._held)]
        if mark:
            self._section = Section.CONTENT
        if content:
            _add_content(Piece(content, piece.token_id, piece.log_probs), parsed)
        else:
            parsed.num_reasoning_tokens += _num_tokens(piece)


def _add_content(piece: Piece, parsed: ParsedDelta) -> None:
    parsed.content += piece.text
    if piece.token_id is not None:
        parsed.content_ids.append(piece.token_id)
    if piece.log_probs is not None:
        parsed.content_log_probs.append(piece.log_probs)


def _num_tokens(piece: Piece) -> int:
    return int(piece.token_id is not None)


def _end_that_begins(text: str, mark: str) -> str:
    """The longest end of the text with which the mark begins."""
    most = min(len(text), len(mark) - 1)
    return next((mark[:size] for size in range(most, 0, -1) if text.endswith(mark[:size])), "")
