"""The grammar that holds for an answer: its format, the calls of tools, and what a model reasons before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from naiad.grammar.json_schema import schema_text
from naiad.openai_server.api.constraints.call_grammar import call_grammar
from naiad.openai_server.api.constraints.grammar_errors import WITH_TOOLS, param_of
from naiad.openai_server.api.constraints.lark import LarkWriter, quoted
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import Span
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, Section
from naiad.openai_server.api.tools import ToolUse
from naiad.sequence import GrammarKind, GrammarSpec

# Models put an empty line between what they reason and what they say.
_GAP = ("\n\n", "\n", "")


@dataclass(frozen=True, slots=True)
class Constraint:
    """What holds for the answers to a chat.

    Attributes:
        outputs: how the checkpoint writes.
        use: the tools, and how they may be called.
        form: the format of the content; None: any text.
    """

    outputs: OutputGrammar
    use: ToolUse
    form: GrammarSpec | None

    def spec(self, begins_in: Section) -> GrammarSpec | None:
        """The grammar of an output that begins in this section; None: anything is allowed.

        Raises:
            APIError: the format can not be combined with the tools, or a schema can not be enforced.
        """
        writer = LarkWriter(*self._marks())
        if self.use.is_constrained:
            return self._after_reasoning(writer, self._calls(writer), begins_in)
        if self.form is None:
            return None
        if self.use.callable:
            grammar = call_grammar(writer, self.outputs, self.use)
            return self._after_reasoning(writer, grammar.text_with_calls(self._form(writer)), begins_in)
        return self._form_after_reasoning(writer, self.form, begins_in)

    def _calls(self, writer: LarkWriter) -> str:
        use = self.use
        grammar = call_grammar(writer, self.outputs, use)
        if not use.is_required:
            return grammar.text_with_calls("" if self.form is None else self._form(writer))
        if self.form is not None:
            message = (
                f"{self.form.field} and tool_choice both say what the answer is: expected tool_choice auto "
                "or none with a format."
            )
            raise APIError(400, message, param=param_of(self.form))
        return grammar.only_calls()

    def _form(self, writer: LarkWriter) -> str:
        """What stands for the format, beside calls of tools."""
        assert self.form is not None
        written = _as_lark(writer, self.form)
        if written is None:
            message = f"{self.form.field} ({self.form.kind.value}) can not be combined with tools."
            raise APIError(400, message, param=param_of(self.form))
        return written

    def _form_after_reasoning(self, writer: LarkWriter, form: GrammarSpec, begins_in: Section) -> GrammarSpec:
        if begins_in is Section.CONTENT:
            return form
        if begins_in is Section.REASONING:
            return msgspec.structs.replace(form, begins_after=self._span.end)
        written = _as_lark(writer, form)
        if written is not None:
            return self._after_reasoning(writer, written, begins_in)
        return msgspec.structs.replace(form, begins_after=self._span.end, opened_by=self._span.begin)

    def _after_reasoning(self, writer: LarkWriter, written: str, begins_in: Section) -> GrammarSpec:
        """The grammar of what is written, behind what the model reasons if it does."""
        if begins_in is Section.CONTENT:
            return self._lark(writer.grammar(written))
        gap = writer.rule("gap", " | ".join(map(quoted, _GAP)))
        answer = writer.rule("answer", written)
        if begins_in is Section.REASONING:
            return self._lark(writer.grammar(f"{gap} {answer}"), self._span.end)
        # Whether it reasons is seen only when it begins to.
        span = self._span
        thought = writer.rule("thought", f"{writer.text(span.begin)} {writer.up_to(span.end)} {gap}")
        return self._lark(writer.grammar(f"{thought}? {answer}"))

    def _lark(self, source: str, begins_after: str = "") -> GrammarSpec:
        field = "tools" if self.form is None else self.form.field
        if self.form is not None and self.use.callable:
            field += WITH_TOOLS
        return GrammarSpec(kind=GrammarKind.LARK, source=source, begins_after=begins_after, field=field)

    @property
    def _span(self) -> Span:
        """What encloses what the model reasons."""
        assert self.outputs.reasoning is not None
        return self.outputs.reasoning.reasoning

    def _marks(self) -> tuple[dict[str, int], dict[str, int]]:
        """The ids of marks that are special tokens, and of those that are other tokens."""
        special: dict[str, int] = {}
        other: dict[str, int] = {}
        for token_id, mark in self.outputs.marks.items():
            (special if token_id in self.outputs.special_ids else other)[mark] = token_id
        return special, other


def _as_lark(writer: LarkWriter, form: GrammarSpec) -> str | None:
    """What stands for a format as a part of another grammar; None: it can not be a part."""
    match form.kind:
        case GrammarKind.JSON_OBJECT:
            return writer.json({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            try:
                return writer.json(json.loads(schema_text(form.source)))
            except ValueError as error:
                message = f"{form.field} ({form.kind.value}) is refused: {error}"
                raise APIError(400, message, param=param_of(form)) from None
        case GrammarKind.CHOICE:
            texts: Sequence[str] = json.loads(form.source)
            return writer.rule("choice", " | ".join(map(quoted, texts)))
    return None
