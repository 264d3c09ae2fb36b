"""Tools, a vocabulary of bytes and marks, and the grammars of calls in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken

from helpers.called_tools import FAMILY, Heard, heard
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.grammar.source import to_llguidance
from naiad.grammar.special_tokens import hide_special_tokens
from naiad.openai_server.api.constraints.constraint import Constraint
from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.families import REASONING_FAMILIES
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, OutputParser, Section
from naiad.openai_server.api.parsing.pieces import Piece
from naiad.openai_server.api.tools import Tool, ToolUse
from naiad.sequence import GrammarSpec

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "all": {"type": "boolean"},
    },
    "required": ["city", "all"],
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
WEATHER, NOW = Tool("get_weather", "", SCHEMA), Tool("a.b/now-1")
BOTH = (WEATHER, NOW)
CALLED = {tool.name: tool.parameters for tool in BOTH}
MAX_STEPS = 400


class Vocabulary:
    """A tokenizer of bytes; marks are special tokens, or other ones, if they are listed."""

    def __init__(self, folder: Path, special: Sequence[str] = (), other: Sequence[str] = ()) -> None:
        made = byte_level_tokenizer()
        made.add_tokens([AddedToken(mark, normalized=False) for mark in other])
        made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in special])
        write_tokenizer(folder, made)
        self.marks = {made.token_to_id(mark): mark for mark in (*special, *other)}
        self.special_ids = frozenset(made.token_to_id(mark) for mark in special)
        end = made.token_to_id("</s>")
        self.llguidance = LLTokenizer(hide_special_tokens(made.to_str(), [end]).text, eos_token=[end])

    def outputs(self, family: str, reasons: bool = False) -> OutputGrammar:
        """How a checkpoint of a family with this vocabulary writes."""
        return OutputGrammar(
            REASONING_FAMILIES[0] if reasons else None, FAMILY[family], self.marks, self.special_ids
        )

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher at the start of a text."""
        special = {mark: token_id for token_id, mark in self.marks.items()}
        matcher = LLMatcher(self.llguidance, to_llguidance(spec, special))
        assert not matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        """The ids of a text; marks are their tokens."""
        ids: list[int] = []
        for mark_or_text in _divided(text, list(self.marks.values())):
            known = [each for each, mark in self.marks.items() if mark == mark_or_text]
            ids += known or self.llguidance.tokenize_str(mark_or_text)
        return ids

    def accepts(self, spec: GrammarSpec | None, text: str) -> bool:
        """Whether a grammar allows a text."""
        assert spec is not None
        matcher, ids = self.matcher(spec), self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, spec: GrammarSpec, draw: random.Random) -> str | None:
        """A random text of the grammar, which is drawn token by token; None: it became too long."""
        matcher, mask = self.matcher(spec), allocate_token_bitmask(1, self.llguidance.vocab_size)
        text = b""
        for _ in range(MAX_STEPS):
            if matcher.is_stopped():
                break
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            end = self.llguidance.eos_token
            if end in allowed and (len(allowed) == 1 or draw.random() < 0.3):
                break
            chosen = int(draw.choice([each for each in allowed if each != end]))
            assert matcher.consume_token(chosen)
            text += (
                self.marks[chosen].encode()
                if chosen in self.marks
                else self.llguidance.decode_bytes([chosen])
            )
        else:
            return None
        return text.decode()


def _divided(text: str, marks: Sequence[str]) -> list[str]:
    for mark in marks:
        before, found, after = text.partition(mark)
        if found:
            return [*_divided(before, marks), mark, *_divided(after, marks)]
    return [text] if text else []


def spec_of(
    outputs: OutputGrammar, section: Section = Section.CONTENT, form: GrammarSpec | None = None, **use: Any
) -> GrammarSpec | None:
    """The grammar of an answer with `BOTH` or other tools; `use` has the fields of a `ToolUse`."""
    tools = use.pop("tools", BOTH)
    return Constraint(outputs, ToolUse(tools=tools, callable=tools, **use), form).spec(section)


def parse(outputs: OutputGrammar, text: str, section: Section = Section.CONTENT) -> Heard:
    """What a constrained answer says."""
    family = outputs.guarded_calls
    assert family is not None
    parser = OutputParser(outputs, section, CallRules(family=family, tools=CALLED, are_certain=True))
    return heard(parser, [[Piece(each, 1)] for each in text] + [[]])


def replace_marks(vocabulary: Vocabulary, marks: dict[int, str]) -> Vocabulary:
    """A vocabulary of which only these marks are tokens; the others are spelled."""
    other = copy(vocabulary)
    other.marks = marks
    return other
