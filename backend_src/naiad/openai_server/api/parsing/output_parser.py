"""Takes the output of a sequence apart, as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from naiad.openai_server.api.parsing.call_finder import CallFinder, CallRules, end_that_begins
from naiad.openai_server.api.parsing.families import (
    CALL_FAMILIES,
    REASONING_FAMILIES,
    CallFamily,
    CallWriting,
    FamilyChoices,
    ReasoningFamily,
)
from naiad.openai_server.api.parsing.pieces import ParsedDelta, Piece


class Section(Enum):
    """A part of an output."""

    OPEN = "nothing but white space yet: it may begin to reason, or to speak"
    REASONING = "reasoning"
    CONTENT = "content"


class Vocabulary(Protocol):
    """What is asked of a checkpoint's tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The template's source."""

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """How one checkpoint writes its outputs.

    Attributes:
        reasoning: the family that says how it reasons; None: it does not.
        calls: the family that says how it calls tools; None: it is not known to do.
        marks: id → text, of the marks that are single tokens.
        special_ids: those of them that are special tokens, which may have no text.
    """

    reasoning: ReasoningFamily | None = None
    calls: CallFamily | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()

    @property
    def writings(self) -> tuple[CallWriting, ...]:
        """How calls are written behind each mark if a grammar holds for them.

        The first is how the checkpoint is taken to write; models write the marks of the others as well.
        """
        assert self.calls is not None, "a checkpoint that calls no tools"
        known = set(self.marks.values())
        fitting = (each for each in self.calls.writings if known.issuperset(each.needs))
        by_mark: dict[str, CallWriting] = {}
        for each in (*fitting, *self.calls.writings):
            by_mark.setdefault(each.begin, each)
        return tuple(by_mark.values())

    @property
    def writing(self) -> CallWriting:
        """How a call that has to be written is written."""
        return self.writings[0]

    @property
    def guarded_calls(self) -> CallFamily | None:
        """The family with the marks for which a grammar looks: behind others it enforces nothing."""
        if self.calls is None:
            return None
        return replace(self.calls, begins=tuple(each.begin for each in self.writings if each.begin))

    def section_after(self, prompt: str) -> Section:
        """The section in which the output begins.

        Args:
            prompt: the end of the prompt's text, special tokens included.
        """
        if self.reasoning is None:
            return Section.CONTENT
        span, text = self.reasoning.reasoning, prompt.rstrip()
        if text.endswith(span.begin):
            return Section.REASONING
        return Section.CONTENT if text.endswith(span.end) else Section.OPEN

    def section_within(self, content: str) -> Section:
        """The section in which the output goes on with a message that has begun.

        Args:
            content: what the message holds so far.
        """
        if self.reasoning is None:
            return Section.CONTENT
        span = self.reasoning.reasoning
        return Section.REASONING if content.rfind(span.begin) > content.rfind(span.end) else Section.CONTENT


def grammar_of(vocabulary: Vocabulary, choices: FamilyChoices = FamilyChoices()) -> OutputGrammar:  # noqa: B008 - frozen
    """Return the grammar of a checkpoint, whose vocabulary this is."""
    reasons, called = _reasoning_of(vocabulary, choices.reasoning), _calls_of(vocabulary, choices.calls)
    marks = () if reasons is None else (reasons.reasoning.begin, reasons.reasoning.end)
    if called is not None:
        marks = (*marks, *called.marks)
    ids = _ids_of(vocabulary, marks)
    return OutputGrammar(reasons, called, ids, frozenset(filter(vocabulary.is_special, ids)))


def _reasoning_of(vocabulary: Vocabulary, choice: str) -> ReasoningFamily | None:
    """A family's marks are in the chat template of its models, or they are tokens of their own."""
    for family in REASONING_FAMILIES:
        span = family.reasoning
        ids = [vocabulary.token_id(mark) for mark in (span.begin, span.end)]
        is_found = span.end in (vocabulary.chat_template or "") or None not in ids
        if family.name == choice or (choice == "auto" and is_found):
            return family
    return None


def _calls_of(vocabulary: Vocabulary, choice: str) -> CallFamily | None:
    template = vocabulary.chat_template or ""
    for family in CALL_FAMILIES:
        is_found = any(all(sign in template for sign in group) for group in family.signs)
        if family.name == choice or (choice == "auto" and is_found):
            return family
    return None


def _ids_of(vocabulary: Vocabulary, marks: Iterable[str]) -> dict[int, str]:
    ids = {mark: vocabulary.token_id(mark) for mark in marks}
    return {token_id: mark for mark, token_id in ids.items() if token_id is not None}


class OutputParser:
    """Parses the output of one sequence as it comes. The result does not depend on how it is divided."""

    def __init__(
        self, grammar: OutputGrammar, begins_in: Section = Section.OPEN, calls: CallRules | None = None
    ) -> None:
        """Start before the first token.

        Args:
            grammar: how the output is written.
            begins_in: the section in which it begins.
            calls: which calls are looked for in the content; None: none.
        """
        self._span = None if grammar.reasoning is None else grammar.reasoning.reasoning
        self._marks = grammar.marks
        self._call_marks = () if calls is None else calls.family.marks
        self._section = Section.CONTENT if self._span is None else begins_in
        self._pending: list[Piece] = []  # while the section is OPEN
        self._held = ""  # text that may begin the mark that is due
        self._finder = None if calls is None else CallFinder(calls)

    @property
    def has_only_content_left(self) -> bool:
        """Whether all that follows is content."""
        return self._section is Section.CONTENT and self._finder is None

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
            if self._finder is not None:
                self._finder.finish(parsed)
        return parsed

    def _with_mark(self, piece: Piece) -> Piece:
        """The piece with the text of a mark that may be due, if it is a special token, which has none."""
        if piece.text or piece.token_id is None:
            return piece
        mark = self._marks.get(piece.token_id)
        return Piece(mark, piece.token_id, piece.log_probs) if mark in self._due_marks() else piece

    def _due_marks(self) -> tuple[str, ...]:
        if self._section is Section.CONTENT or self._span is None:
            return self._call_marks
        return (
            (self._span.end,) if self._section is Section.REASONING else (self._span.begin, *self._call_marks)
        )

    def _take(self, piece: Piece, parsed: ParsedDelta) -> None:
        match self._section:
            case Section.OPEN:
                self._begin(piece, parsed)
            case Section.REASONING:
                self._reason(piece, parsed)
            case Section.CONTENT:
                self._add_content(piece, parsed)

    def _begin(self, piece: Piece, parsed: ParsedDelta) -> None:
        assert self._span is not None
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
            self._add_content(piece, parsed)
        self._pending.clear()

    def _reason(self, piece: Piece, parsed: ParsedDelta) -> None:
        assert self._span is not None
        reasoning, mark, content = (self._held + piece.text).partition(self._span.end)
        self._held = "" if mark else end_that_begins(reasoning, self._span.end)
        parsed.reasoning += reasoning[: len(reasoning) - len(self._held)]
        if mark:
            self._section = Section.CONTENT
        if content:
            self._add_content(Piece(content, piece.token_id, piece.log_probs), parsed)
        else:
            parsed.num_reasoning_tokens += _num_tokens(piece)

    def _add_content(self, piece: Piece, parsed: ParsedDelta) -> None:
        if self._finder is not None:
            self._finder.take(piece, parsed)
            return
        parsed.content += piece.text
        parsed.add_content_token(piece)


def _num_tokens(piece: Piece) -> int:
    return int(piece.token_id is not None)
