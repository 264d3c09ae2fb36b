"""The grammar of calls of tools, in the form in which a family writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from naiad.grammar.json_schema import check_structure, read_schema
from naiad.openai_server.api.constraints.arguments import UnenforceableError, arguments_rule
from naiad.openai_server.api.constraints.lark import TEXT, LarkWriter
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import CallFamily, CallWriting
from naiad.openai_server.api.parsing.output_parser import OutputGrammar
from naiad.openai_server.api.tools import ToolUse


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Writes the calls of a checkpoint.

    Attributes:
        writer: takes the rules.
        family: how the checkpoint's family writes calls.
        writings: which of its forms the checkpoint has, one for each mark; the first is preferred.
        use: the tools, and how they may be called.
    """

    writer: LarkWriter
    family: CallFamily
    writings: tuple[CallWriting, ...]
    use: ToolUse

    @property
    def writing(self) -> CallWriting:
        """The preferred form."""
        return self.writings[0]

    def only_calls(self) -> str:
        """What stands for one call or more, and nothing else.

        Raises:
            APIError: a tool's schema can not be enforced.
        """
        begin = self.writer.text(self.writing.begin)
        return self._joined(begin, f"{begin} {self._after_begin(self.writing, self._call())}")

    def text_with_calls(self, otherwise: str = "") -> str:
        """What stands for any text in which every call is a correct one.

        Args:
            otherwise: what stands for an answer without calls; "": any text.

        Raises:
            APIError: a tool's schema can not be enforced.
        """
        if otherwise:
            return f"{self.writer.rule('calls', self.only_calls())} | {otherwise}"
        if not self.writing.begin:
            # Only the first character says whether calls follow.
            first = re.escape(self.family.bare)
            free = self.writer.rule("free", f"/\\s*([^{first}\\s](?s:.*))?/")
            return f"{self.writer.rule('calls', self.only_calls())} | {free}"
        call = self._call()
        blocks = (
            f"{self.writer.up_to(each.begin)} {self._after_begin(each, call)}" for each in self.writings
        )
        block = self.writer.rule("block", " | ".join(blocks))
        rest = self.writer.rule("free", TEXT)
        return f"{block}* {rest}" if self.use.allows_several else f"{block} | {rest}"

    def _joined(self, begin: str, block: str) -> str:
        """Calls one after the other, if each has a mark of its own."""
        if not (self.writing.repeats_begin and self.use.allows_several):
            return block
        again = self.writer.rule("again", f"{self.writer.text(self.writing.between)} {block}")
        return f"{block} {again}*"

    def _after_begin(self, writing: CallWriting, call: str) -> str:
        """A call, or the list of calls, behind its mark."""
        text = self.writer.text
        calls = f"{text(writing.opening)} {call}"
        if self.use.allows_several and not writing.repeats_begin:
            calls += f" {self.writer.rule('again', f'{text(writing.between)} {call}')}*"
        return f"{calls} {text(writing.closing)}"

    def _call(self) -> str:
        """A call from its name to what stands behind its arguments."""
        return self.writer.rule(
            "call", " | ".join(self._tool(index) for index in range(len(self.use.callable)))
        )

    def _tool(self, index: int) -> str:
        tool, writing = self.use.callable[index], self.writing
        try:
            if tool.is_strict or self.use.is_required:
                read_schema(json.dumps(tool.parameters))
            else:
                check_structure(tool.parameters)
            arguments = arguments_rule(
                self.writer, self.family.form, tool.parameters, is_strict=tool.is_strict
            )
        except ValueError as error:
            kind = "strict tool" if tool.is_strict else "tool"
            message = f"the parameters of the {kind} {tool.name}: {error}."
            raise APIError(400, message, param="tools", code="unsupported_value") from None
        except UnenforceableError as error:
            message = (
                f"the parameters of the tool {tool.name} hold {error}: this can not be enforced in the form "
                f"in which this model calls tools ({self.family.name})."
            )
            raise APIError(400, message, param="tools", code="unsupported_value") from None
        before = self.writer.text(tool.name + writing.before_arguments)
        return self.writer.rule("tool", f"{before} {arguments} {self.writer.text(writing.after_arguments)}")


def call_grammar(writer: LarkWriter, outputs: OutputGrammar, use: ToolUse) -> CallGrammar:
    """The grammar of the calls of a checkpoint, which `outputs` describes."""
    assert outputs.calls is not None, "a checkpoint that calls no tools"
    return CallGrammar(writer, outputs.calls, outputs.writings, use)
