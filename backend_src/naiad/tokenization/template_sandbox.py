"""Runs a checkpoint's chat template in a sandbox with limits.

A template is code that comes with the weights. It sees plain strings, lists and dicts, and access to
Python's internal attributes raises. Its time, the size of every value it builds and the size of its
output are bounded.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDER_S = 0.5
MAX_RENDERED_CHARS = 4 << 20
MAX_VALUE_LENGTH = 4 << 20
MAX_INT_BITS = 64
MAX_ARGUMENT = 10_000
_REFUSED_FILTERS = ("center", "batch", "wordwrap", "format", "xmlattr", "urlize", "pprint", "random")
_REFUSED_STR_METHODS = ("format", "format_map", "translate")
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")


class RenderTimeoutError(BaseException):
    """The template ran too long. Not an `Exception`, so that no handler inside Jinja swallows it."""


class _Generation(Extension):
    """Renders `{% generation %} … {% endgeneration %}`, which marks training text, as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja with the functions that chat templates expect, and with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Provide the functions that Hugging Face provides to templates."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters["join"] = _limited_join
        self.filters["replace"] = _limited_replace
        self.filters["indent"] = _limit_arguments(self.filters["indent"])
        self.filters["int"] = _limit_arguments(self.filters["int"])

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once: the plain sandbox would render an unsafe attribute as an empty string."""
        raise SecurityError(f"access to attribute {attribute!r} is not allowed")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse the string methods whose results have no bounded size."""
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str):
            name = value.__name__
            text: str = value.__self__
            if name in _REFUSED_STR_METHODS:
                raise SecurityError(f"str.{name} is not allowed")
            if name == "replace":
                return lambda *args: _limited_replace(text, *args)
            if name == "join":
                return lambda items: _limited_join(items, text)
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call only with numbers of a sane size; `range` has its own limit."""
        if __obj is not __self.globals["range"]:
            _check_arguments(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute only results of a sane size."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and (abs(left) > MAX_ARGUMENT or abs(right) > MAX_INT_BITS):
            raise SecurityError("a power that is too large")
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format that is too wide")
        return _checked(super().call_binop(context, operator, left, right))


class _Watch:
    """A trace function that stops a template which runs too long or builds too large a value."""

    def __init__(self, deadline_s: float) -> None:
        """Stop it at this moment of `time.monotonic`."""
        self._deadline_s = deadline_s

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> _Watch:
        """See `sys.settrace`."""
        if time.monotonic() > self._deadline_s:
            raise RenderTimeoutError
        if frame.f_code.co_filename == "<template>":
            for value in frame.f_locals.values():
                _checked(value)
        return self


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Render within the limits.

    Raises:
        RenderTimeoutError: it took longer than MAX_RENDER_S.
        Exception: whatever the template raised, or SecurityError for a limit.
    """
    pieces: list[str] = []
    num_chars = 0
    previous = sys.gettrace()
    # A loop that emits nothing offers no other place to check the clock.
    sys.settrace(_Watch(time.monotonic() + MAX_RENDER_S))
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise SecurityError(f"more than {MAX_RENDERED_CHARS} characters")
    finally:
        sys.settrace(previous)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump plain JSON; Jinja's own filter escapes it for HTML."""
    if isinstance(indent, int):
        _check_arguments((indent,), {})
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _limited_join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        items = [item[attribute] for item in items]
    texts = [str(item) for item in items]
    _check_length(len(separator) * len(texts) + sum(map(len, texts)))
    return separator.join(texts)


def _limited_replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    num_found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _check_length(len(text) + num_found * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _limit_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _checked(function(value, *args, **kwargs))

    return limited


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
            raise SecurityError(f"a number above {MAX_ARGUMENT} as an argument")


def _check_product(left: Any, right: Any) -> None:
    for count, value in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            _check_length(count * len(value))


def _checked(value: Any) -> Any:
    """Return the value if it is not too large."""
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise SecurityError(f"a number of more than {MAX_INT_BITS} bits")
    elif isinstance(value, Namespace):
        for attribute in getattr(value, "_Namespace__attrs").values():  # noqa: B009 - a mangled name
            if not isinstance(attribute, Namespace):
                _checked(attribute)
    return value


def _check_length(length: int) -> None:
    if length > MAX_VALUE_LENGTH:
        raise SecurityError(f"a value longer than {MAX_VALUE_LENGTH}")
