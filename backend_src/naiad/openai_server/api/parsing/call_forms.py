"""Reads the calls of each form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from naiad.openai_server.api.parsing.cursor import BrokenError, Cursor, Reading
from naiad.openai_server.api.parsing.families import CallFamily, CallForm
from naiad.openai_server.api.parsing.json_text import (
    read_comma_or,
    read_key,
    read_object,
    read_string,
    read_value,
)
from naiad.openai_server.api.parsing.python_text import Value, as_json, read_literal
from naiad.openai_server.api.parsing.xml_values import value_of

_NAME = re.compile(r"[^\s\"'<>\[\](){}=,;]*")
_IDENTIFIER = re.compile(r"\w*")
_CALL_ID = re.compile(r"[A-Za-z0-9_-]*")
_XML_END, _XML_VALUE_END = "</function>", "</parameter>"

# A tool's name → the JSON schema of its arguments.
Tools = Mapping[str, Mapping[str, Any]]


class CallSink(Protocol):
    """Takes calls as they are read."""

    @property
    def tools(self) -> Tools:
        """The tools that may be called."""

    def name(self, name: str) -> None:
        """A call's name is known.

        Raises:
            BrokenError: there is no such tool.
        """

    def begin_arguments(self) -> None:
        """The text from here on is the call's arguments."""

    def end_arguments(self) -> None:
        """The text up to here was the call's arguments."""

    def end(self, arguments: str | None = None) -> None:
        """The call is complete.

        Args:
            arguments: its arguments, if they are not in the text as they are reported.
        """


def read_calls(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    """Read calls behind the mark that begins them, and the mark that ends them, which may be cut off.

    What comes after a complete call and is none of the form is left for others.

    Raises:
        BrokenError: a call is not complete.
    """
    yield from _READERS[family.form](family, cursor, sink)
    if family.end:
        yield from cursor.pass_mark(family.end)


def _read_json(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    yield from cursor.space()
    if (yield from cursor.sees("[")):
        yield from cursor.space()
        yield from _read_call_object(family, cursor, sink)
        while not (yield from cursor.sees_after_space("]")):
            if not (yield from cursor.sees_after_space(",")):
                return
            yield from cursor.space()
            yield from _read_call_object(family, cursor, sink)
        return
    yield from _read_call_object(family, cursor, sink)
    while family.separator and (yield from cursor.sees_after_space(family.separator)):
        yield from cursor.space()
        yield from _read_call_object(family, cursor, sink)


def _read_call_object(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    """Read a call that is an object; its keys may come in any order."""
    known: set[str] = set()
    yield from cursor.expect("{")
    while True:
        key = yield from read_key(cursor)
        kind = family.kind_of_key(key)
        if kind == "" or kind in known:
            raise BrokenError
        known.add(kind)
        if kind == "name":
            sink.name((yield from read_string(cursor)))
        elif kind == "arguments":
            sink.begin_arguments()
            yield from read_object(cursor)
            sink.end_arguments()
        else:
            yield from read_value(cursor)
        if (yield from read_comma_or(cursor, "}")):
            break
    if "name" not in known:
        raise BrokenError
    sink.end()


def _read_named(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    yield from cursor.space()
    if (yield from cursor.peek()) in ("{", "["):
        yield from _read_json(family, cursor, sink)
        return
    sink.name((yield from cursor.run(_NAME)))
    yield from cursor.space()
    if (yield from cursor.sees("[CALL_ID]")):
        yield from cursor.run(_CALL_ID)
    yield from cursor.sees("[ARGS]")
    yield from cursor.space()
    sink.begin_arguments()
    yield from read_object(cursor)
    sink.end_arguments()
    sink.end()


def _read_python(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.expect("[")
    while True:
        yield from cursor.space()
        yield from _read_python_call(cursor, sink)
        if (yield from cursor.sees_after_space("]")) or not (yield from cursor.sees_after_space(",")):
            return


def _read_python_call(cursor: Cursor, sink: CallSink) -> Reading[None]:
    arguments: dict[str, Value] = {}
    sink.name((yield from cursor.run(_NAME)))
    yield from cursor.space()
    yield from cursor.expect("(")
    while not (yield from cursor.sees_after_space(")")):
        yield from cursor.space()
        key = yield from cursor.run(_IDENTIFIER)
        if not key or key in arguments:
            raise BrokenError
        yield from cursor.space()
        yield from cursor.expect("=")
        yield from cursor.space()
        arguments[key] = yield from read_literal(cursor)
        if (yield from read_comma_or(cursor, ")")):
            break
    sink.end(as_json(arguments))


def _read_xml(family: CallFamily, cursor: Cursor, sink: CallSink) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.expect("<function=")
    name = yield from cursor.run(_NAME)
    sink.name(name)
    yield from cursor.expect(">")
    properties = sink.tools[name].get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Value] = {}
    while not (yield from cursor.sees_after_space(_XML_END)):
        yield from cursor.space()
        yield from cursor.expect("<parameter=")
        key = yield from cursor.until(">")
        written = yield from cursor.until(_XML_VALUE_END)
        arguments[key] = value_of(written.removeprefix("\n").removesuffix("\n"), schemas.get(key))
    sink.end(as_json(arguments))


_READERS: Mapping[CallForm, Callable[[CallFamily, Cursor, CallSink], Reading[None]]] = {
    CallForm.JSON: _read_json,
    CallForm.NAMED: _read_named,
    CallForm.PYTHON: _read_python,
    CallForm.XML: _read_xml,
}
