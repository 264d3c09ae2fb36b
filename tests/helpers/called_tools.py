"""What outputs say and call, for tests of parsers: a corpus for every family, and how a parser hears it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.families import CALL_FAMILIES, REASONING_FAMILIES, CallFamily
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, OutputParser, Section
from naiad.openai_server.api.parsing.pieces import ParsedDelta, Piece

FAMILY: dict[str, CallFamily] = {family.name: family for family in CALL_FAMILIES}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"type": "object"},
            "b": {"type": ["boolean", "null"]},
            "s": {"type": ["string", "null"]},
            "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "m": {"oneOf": [{"type": "string"}, {"type": "array"}, {"$ref": "#"}, True]},
        },
    },
    "get-time": {},
}
# A call: its name and its arguments as they are reported.
Call = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """An output of a family, and what it says."""

    family: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def _hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


F1 = '{"name": "f", "arguments": {"a": "x"}}'
NESTED = '{"o": {"p": [1, {"q": "}]"}], "r": {}}, "n": -1.5e3}'
QUOTED = '{"a": "say \\"hi\\" \\\\ \\n\\u00e9 </tool_call>"}'
UNICODE = '{"a": "你好 😀 é"}'
CASES: tuple[Case, ...] = (
    # hermes
    Case("hermes", "", ""),
    Case("hermes", "Hello <world>\n", "Hello <world>\n"),
    Case("hermes", "  \n", "  \n"),
    Case("hermes", _hermes(F1), "", (("f", '{"a": "x"}'),)),
    Case("hermes", f"Look:\n{_hermes(F1)} done", "Look:\n done", (("f", '{"a": "x"}'),)),
    Case("hermes", f"\n\n{_hermes(F1)}\n", "", (("f", '{"a": "x"}'),)),
    Case(
        "hermes",
        f'<tool_call>{F1}</tool_call><tool_call>{{"name":"get-time"}}</tool_call>',
        "",
        (("f", '{"a": "x"}'), ("get-time", "{}")),
    ),
    Case(
        "hermes",
        f"<tool_call>[{F1}, {F1}]</tool_call>",
        "",
        (("f", '{"a": "x"}'), ("f", '{"a": "x"}')),
    ),
    Case("hermes", _hermes(f'{{"arguments": {NESTED}, "name": "f"}}'), "", (("f", NESTED),)),
    Case("hermes", _hermes(f'{{"name": "f", "arguments": {QUOTED}}}'), "", (("f", QUOTED),)),
    Case("hermes", _hermes(f'{{"name": "f", "arguments": {UNICODE}}}'), "", (("f", UNICODE),)),
    Case("hermes", f"<tool_call>{F1}", "", (("f", '{"a": "x"}'),)),
    Case(
        "hermes",
        f"<tool_call>{F1}\n<tool_call>{F1}</tool_call>",
        "",
        (("f", '{"a": "x"}'), ("f", '{"a": "x"}')),
    ),
    Case("hermes", f"<tool_call>{F1}\n</tool", "", (("f", '{"a": "x"}'),)),
    Case("hermes", f"<tool_call>{F1}\n<tool", "\n<tool", (("f", '{"a": "x"}'),)),
    Case("hermes", f"{_hermes(F1)}\n</tool", "\n</tool", (("f", '{"a": "x"}'),)),
    Case("hermes", f"<tool_call>{F1} x</tool_call>", " x</tool_call>", (("f", '{"a": "x"}'),)),
    Case("hermes", f"<tool_call><tool_call>{F1}</tool_call>", "<tool_call>", (("f", '{"a": "x"}'),)),
    Case("hermes", _hermes('{"name": "g", "arguments": {}}'), _hermes('{"name": "g", "arguments": {}}')),
    Case(
        "hermes",
        _hermes('{"name": "f", "arguments": {"a": }}'),
        _hermes('{"name": "f", "arguments": {"a": }}'),
    ),
    Case("hermes", _hermes('{"name": "f", "arguments": "x"}'), _hermes('{"name": "f", "arguments": "x"}')),
    Case("hermes", _hermes('{"arguments": {}}'), _hermes('{"arguments": {}}')),
    Case("hermes", _hermes("f(a=1)"), _hermes("f(a=1)")),
    Case("hermes", '<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum'),
    Case("hermes", f"<tool_call>[{F1}, {{]</tool_call>", ", {]</tool_call>", (("f", '{"a": "x"}'),)),
    Case(
        "hermes",
        f"<think>a <tool_call></think>\n\n{_hermes(F1)}",
        "",
        (("f", '{"a": "x"}'),),
        "a <tool_call>",
    ),
    Case("hermes", f"<think>a</think>b{_hermes(F1)}", "b", (("f", '{"a": "x"}'),), "a"),
    # llama3_json
    Case("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', "", (("f", '{"a": "x"}'),)),
    Case("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {NESTED}}}', "", (("f", NESTED),)),
    Case(
        "llama3_json",
        '{"type": "function", "function": "f", "parameters": {}} ; {"name": "get-time", "parameters": {}}\n',
        "",
        (("f", "{}"), ("get-time", "{}")),
    ),
    Case("llama3_json", f'\n{{"name": "f", "arguments": {QUOTED}}} ok', " ok", (("f", QUOTED),)),
    Case("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}'),
    Case("llama3_json", '{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}'),
    Case("llama3_json", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}'),
    Case("llama3_json", '{"name": "f", "parameters": {}}; then', "; then", (("f", "{}"),)),
    Case("llama3_json", "<|python_tag|>f.call(1)", "<|python_tag|>f.call(1)"),
    Case("llama3_json", 'Ok.<|python_tag|>{"name": "f"}', "Ok.", (("f", "{}"),)),
    # mistral
    Case("mistral", f"[TOOL_CALLS] [{F1}, {F1}]", "", (("f", '{"a": "x"}'), ("f", '{"a": "x"}'))),
    Case(
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {NESTED}, "id": "abcdefghi"}}]',
        "",
        (("f", NESTED),),
    ),
    Case("mistral", f"[TOOL_CALLS]f[ARGS]{QUOTED}", "", (("f", QUOTED),)),
    Case(
        "mistral",
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get-time[CALL_ID]abc123DEF[ARGS]{"a": 1}',
        "",
        (("f", "{}"), ("get-time", '{"a": 1}')),
    ),
    Case("mistral", "See [1] and\n[TOOL_CALLS]f{}", "See [1] and\n", (("f", "{}"),)),
    Case("mistral", "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}"),
    Case("mistral", "[TOOL_CALLS]f[ARGS]{'a': 1}", "[TOOL_CALLS]f[ARGS]{'a': 1}"),
    Case("mistral", "[TOOL_CALLS]f[ARGS]{}{}", "{}", (("f", "{}"),)),
    Case("mistral", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR"),
    Case("mistral", "[TOOL_", "[TOOL_"),
    # pythonic
    Case("pythonic", "[f(a='x', n=1)]", "", (("f", '{"a": "x", "n": 1}'),)),
    Case(
        "pythonic",
        "[f(a=\"it's\", o={'p': [1, -2.5, (True, None)]}), get-time()]",
        "",
        (("f", '{"a": "it\'s", "o": {"p": [1, -2.5, [true, null]]}}'), ("get-time", "{}")),
    ),
    Case("pythonic", r"[f(a='\'\\ \n\x41\u00e9\d')]", "", (("f", r'{"a": "' + r"'\\ \nAé\\d" + '"}'),)),
    Case("pythonic", "[f(a='\\ud83d\\ude00 你')] ok", " ok", (("f", '{"a": "😀 你"}'),)),
    Case("pythonic", "<|python_start|>[f(n=1e2,)]<|python_end|>", "", (("f", '{"n": 100.0}'),)),
    Case("pythonic", "[1] is a note", "[1] is a note"),
    Case("pythonic", "[g(a=1)]", "[g(a=1)]"),
    Case("pythonic", "[f(1)]", "[f(1)]"),
    Case("pythonic", "[f(a=b)]", "[f(a=b)]"),
    Case("pythonic", "[f(a=__import__('os'))]", "[f(a=__import__('os'))]"),
    Case("pythonic", "[f(a=1, a=2)]", "[f(a=1, a=2)]"),
    Case("pythonic", "[f(n=1), f(n=", ", f(n=", (("f", '{"n": 1}'),)),
    Case("pythonic", "[f(n=1e999)]", "[f(n=1e999)]"),
    Case("pythonic", "Say [f(n=1)]", "Say [f(n=1)]"),
    # qwen3_coder
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx < y\n\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        (("f", '{"a": "x < y\\n", "n": 5}'),),
    ),
    Case(
        "qwen3_coder",
        'I.\n<tool_call><function=f><parameter=o>{"p": [1]}</parameter><parameter=b>True</parameter>'
        "<parameter=s>null</parameter></function></tool_call>",
        "I.\n",
        (("f", '{"o": {"p": [1]}, "b": true, "s": null}'),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get-time></function></tool_call>\n"
        "<tool_call><function=f><parameter=n>many</parameter></function></tool_call>",
        "",
        (("get-time", "{}"), ("f", '{"n": "many"}')),
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=f><parameter=u>12345</parameter><parameter=m>[1]</parameter></function></tool_call>"
        "<tool_call><function=f><parameter=u>null</parameter><parameter=m>{}</parameter></function></tool_call>",
        "",
        (("f", '{"u": "12345", "m": [1]}'), ("f", '{"u": null, "m": "{}"}')),
    ),
    Case("qwen3_coder", "<tool_call><function=g></function>", "<tool_call><function=g></function>"),
    Case("qwen3_coder", "<tool_call><function=f><parameter=a>x", "<tool_call><function=f><parameter=a>x"),
    Case("qwen3_coder", "<tool_call>\n<function=f>x</function>", "<tool_call>\n<function=f>x</function>"),
    Case("qwen3_coder", "<function=f></function>", "<function=f></function>"),
    # granite
    Case("granite", f"<|tool_call|>[{F1}, {F1}]", "", (("f", '{"a": "x"}'), ("f", '{"a": "x"}'))),
    Case("granite", f"<tool_call> {F1}", "", (("f", '{"a": "x"}'),)),
    Case("granite", f'So: <|tool_call|>[{{"name": "f", "arguments": {NESTED}}}]\n', "So: ", (("f", NESTED),)),
    Case("granite", "<|tool_call|>[]", "<|tool_call|>[]"),
    Case("granite", "<|tool_call|>[{'name': 'f'}]", "<|tool_call|>[{'name': 'f'}]"),
    # phi4_mini_json
    Case("phi4_mini_json", f"functools[{F1},{F1}]", "", (("f", '{"a": "x"}'), ("f", '{"a": "x"}'))),
    Case("phi4_mini_json", f"<|tool_call|>[{F1}]<|/tool_call|>", "", (("f", '{"a": "x"}'),)),
    Case("phi4_mini_json", f'functools[{{"name": "f", "arguments": {UNICODE}}}] x', " x", (("f", UNICODE),)),
    Case("phi4_mini_json", "import functools\n[1]", "import functools\n[1]"),
    Case("phi4_mini_json", "functools.cache", "functools.cache"),
)


@dataclass
class Heard:
    """What a parser has reported."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    content_ids: list[int] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, parsed: ParsedDelta) -> None:
        """Add a delta; checks that calls are reported by the rules."""
        self.reasoning += parsed.reasoning
        self.content += parsed.content
        self.content_ids += parsed.content_ids
        self.num_reasoning_tokens += parsed.num_reasoning_tokens
        for call in parsed.calls:
            assert bool(call.name) == bool(call.call_id) == (call.index == len(self.calls))
            assert bool(call.name) != bool(call.arguments)
            if call.name:
                self.calls.append((call.name, ""))
                self.ids.append(call.call_id)
            else:
                name, arguments = self.calls[-1]
                assert call.index == len(self.calls) - 1
                self.calls[-1] = (name, arguments + call.arguments)


def parser_for(family: str, **rules: Any) -> OutputParser:
    """A parser of a family that reasons between `<think>` and `</think>`."""
    chosen = FAMILY[family]
    grammar = OutputGrammar(REASONING_FAMILIES[0], chosen)
    return OutputParser(grammar, Section.OPEN, CallRules(family=chosen, tools=TOOLS, **rules))


def heard(parser: OutputParser, deltas: Sequence[Sequence[Piece]]) -> Heard:
    """Parse deltas, the last of which is the end."""
    found = Heard()
    for index, pieces in enumerate(deltas):
        found.add(parser.parse_delta(pieces, finished=index == len(deltas) - 1))
    return found


def cut(text: str, places: Sequence[int]) -> list[Piece]:
    """The text as tokens that end at these places; their ids are their numbers."""
    edges = [0, *places, len(text)]
    return [Piece(text[begin:end], number) for number, (begin, end) in enumerate(pairwise(edges))]
