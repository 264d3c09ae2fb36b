"""Outputs are taken apart in the same way however they are divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from naiad.openai_server.api.parsing.families import REASONING_FAMILIES, FamilyChoices
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, OutputParser, Section, grammar_of
from naiad.openai_server.api.parsing.pieces import ParsedDelta, Piece
from naiad.outputs import TokenLogProbs

THINK, BRACKETED = (OutputGrammar(family) for family in REASONING_FAMILIES)

# Each text with its reasoning and its content, for each section in which it may begin.
CASES: list[tuple[Section, str, str, str]] = [
    (Section.OPEN, "", "", ""),
    (Section.OPEN, "Hello", "", "Hello"),
    (Section.OPEN, " \n", "", " \n"),
    (Section.OPEN, " \n Hi", "", " \n Hi"),
    (Section.OPEN, "<think>a b</think>\n\nc", "a b", "\n\nc"),
    (Section.OPEN, "\n <think>a</think>c", "a", "c"),
    (Section.OPEN, "<think></think>c", "", "c"),
    (Section.OPEN, "<think>a", "a", ""),
    (Section.OPEN, "<thi", "", "<thi"),
    (Section.OPEN, "<thin>k", "", "<thin>k"),
    (Section.OPEN, " <", "", " <"),
    (Section.OPEN, "a<think>b</think>c", "", "a<think>b</think>c"),
    (Section.OPEN, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (Section.OPEN, "<think><think>a</think>b", "<think>a", "b"),
    (Section.REASONING, "a</think>b", "a", "b"),
    (Section.REASONING, "</think>", "", ""),
    (Section.REASONING, "a</thin", "a</thin", ""),
    (Section.REASONING, "a</</think></think>b", "a</", "</think>b"),
    (Section.REASONING, "</thi</think>😀", "</thi", "😀"),
    (Section.REASONING, "", "", ""),
    (Section.CONTENT, "<think>a</think>b", "", "<think>a</think>b"),
]


@dataclass
class Heard:
    reasoning: str = ""
    content: str = ""
    content_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def add(self, parsed: ParsedDelta) -> None:
        self.reasoning += parsed.reasoning
        self.content += parsed.content
        self.content_ids += parsed.content_ids
        self.log_probs += parsed.content_log_probs
        self.num_reasoning_tokens += parsed.num_reasoning_tokens


def heard(grammar: OutputGrammar, begins_in: Section, deltas: Sequence[Sequence[Piece]]) -> Heard:
    parser, found = OutputParser(grammar, begins_in), Heard()
    for index, pieces in enumerate(deltas):
        found.add(parser.parse_delta(pieces, finished=index == len(deltas) - 1))
    return found


def pieces_of(text: str, cuts: Sequence[int]) -> list[Piece]:
    ends = [*cuts, len(text)]
    texts = [text[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    return [Piece(each, number, TokenLogProbs(-float(number))) for number, each in enumerate(texts)]


def divisions(text: str) -> Iterator[list[Piece]]:
    """Every division of the text into one, two or three tokens, some of them empty; and into characters."""
    for num_cuts in (0, 1, 2):
        for cuts in itertools.combinations_with_replacement(range(len(text) + 1), num_cuts):
            yield pieces_of(text, cuts)
    yield pieces_of(text, range(1, len(text)))


@pytest.mark.parametrize(("begins_in", "text", "reasoning", "content"), CASES)
def test_every_division_gives_the_same_parts(
    begins_in: Section, text: str, reasoning: str, content: str
) -> None:
    for pieces in divisions(text):
        # One token a delta, all in one, and the end by itself.
        for deltas in ([[piece] for piece in pieces], [pieces], [pieces, []]):
            found = heard(THINK, begins_in, deltas)
            assert (found.reasoning, found.content) == (reasoning, content), pieces
            assert len(found.content_ids) + found.num_reasoning_tokens == len(pieces), pieces
            assert [-each.log_prob for each in found.log_probs] == found.content_ids


def test_a_family_has_marks_of_its_own() -> None:
    for pieces in divisions("[THINK]<think>[/[/THINK] b"):
        found = heard(BRACKETED, Section.OPEN, [pieces])
        assert (found.reasoning, found.content) == ("<think>[/", " b")


@pytest.mark.parametrize(("begins_in", "text", "reasoning", "content"), CASES)
def test_the_tokens_of_the_content_are_those_that_have_its_text(
    begins_in: Section, text: str, reasoning: str, content: str
) -> None:
    pieces = pieces_of(text, range(1, len(text)))  # one character a token
    found = heard(THINK, begins_in, [pieces])
    assert "".join(pieces[each].text for each in found.content_ids) == content
    if content:
        assert found.content_ids == list(range(len(text) - len(content), len(text)))


def test_a_token_with_the_end_of_a_mark_and_content_belongs_to_the_content() -> None:
    found = heard(THINK, Section.REASONING, [[Piece("a</thi", 7), Piece("nk>b", 8), Piece("c", 9)]])
    assert (found.reasoning, found.content, found.content_ids) == ("a", "bc", [8, 9])
    assert found.num_reasoning_tokens == 1


def test_nothing_is_held_back_longer_than_a_mark_may_begin() -> None:
    parser = OutputParser(THINK, Section.REASONING)
    heard_at_once = [parser.parse_delta([Piece(each)], finished=False).reasoning for each in "a <b </c"]
    assert heard_at_once == ["a", " ", "", "<b", " ", "", "", "</c"]


def test_marks_that_are_special_tokens_have_no_text_of_their_own() -> None:
    grammar = OutputGrammar(REASONING_FAMILIES[0], None, {90: "<think>", 91: "</think>"})
    pieces = [Piece("", 90), Piece("a", 1), Piece("", 91), Piece("b", 2), Piece("", 3)]
    for deltas in ([pieces], [[piece] for piece in pieces]):
        found = heard(grammar, Section.OPEN, deltas)
        assert (found.reasoning, found.content, found.content_ids) == ("a", "b", [2, 3])
        assert found.num_reasoning_tokens == 3
    again = [*pieces, Piece("", 90), Piece("", 91)]
    assert heard(grammar, Section.OPEN, [again]).content == "b", "no longer marks"
    assert heard(grammar, Section.REASONING, [[Piece("", 90), Piece("a", 1)]]).reasoning == "a"
    shown = [Piece("<think>", 90), Piece("a", 1), Piece("</think>", 91), Piece("b", 2)]
    assert heard(grammar, Section.OPEN, [shown]).reasoning == "a"


@dataclass
class Words:
    chat_template: str | None = None
    ids: dict[str, int] = field(default_factory=dict)

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def is_special(self, token_id: int) -> bool:
        return token_id == 6


def test_the_family_is_that_of_the_checkpoint() -> None:
    assert grammar_of(Words()) == OutputGrammar()
    assert grammar_of(Words("{{ messages }}", {"a": 1})) == OutputGrammar()
    by_template = grammar_of(Words("{% if '</think>' in content %}{% endif %}"))
    assert by_template == OutputGrammar(REASONING_FAMILIES[0])
    by_tokens = grammar_of(Words(None, {"[THINK]": 5, "[/THINK]": 6}))
    assert by_tokens == OutputGrammar(
        REASONING_FAMILIES[1], None, {5: "[THINK]", 6: "[/THINK]"}, frozenset({6})
    )


def test_the_family_can_be_chosen() -> None:
    thinks = Words("</think>", {"[THINK]": 5})
    assert grammar_of(thinks, FamilyChoices("none")) == OutputGrammar()
    assert grammar_of(thinks, FamilyChoices("mistral")) == OutputGrammar(
        REASONING_FAMILIES[1], None, {5: "[THINK]"}
    )
    assert grammar_of(Words(), FamilyChoices("think")) == OutputGrammar(REASONING_FAMILIES[0])


@pytest.mark.parametrize(
    ("prompt", "section"),
    [
        ("assistant\n", Section.OPEN),
        ("assistant\n<think>\n", Section.REASONING),
        ("assistant\n<think>", Section.REASONING),
        ("<think>\n\n</think>\n\n", Section.CONTENT),
        ("use <think> tags<|im_end|>\nassistant\n", Section.OPEN),
    ],
)
def test_a_template_can_begin_to_reason(prompt: str, section: Section) -> None:
    assert THINK.section_after(prompt) is section


def test_a_message_that_is_continued_goes_on_where_it_ended() -> None:
    assert THINK.section_within("<think>so far") is Section.REASONING
    assert THINK.section_within("<think>so far</think> Well") is Section.CONTENT
    assert THINK.section_within("Well") is Section.CONTENT
