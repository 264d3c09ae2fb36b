"""Writes grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from naiad.grammar.json_schema import with_patterns

# JSON as models write it, in one line; white space without a bound would go on for ever.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HEADER = "%llguidance {}"
TEXT = "/(?s:.*)/"


class LarkWriter:
    """Collects the rules of a grammar."""

    def __init__(
        self, special_marks: Mapping[str, int], other_marks: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Begin without rules.

        Args:
            special_marks: mark → id, of the marks that are special tokens: text can not stand for them.
            other_marks: of those that are tokens of other kinds: ordinary tokens may spell them, too.
        """
        self._special_marks = frozenset(special_marks)
        # Of other added tokens llguidance takes only these for no text.
        self._ids = {
            mark: token_id
            for mark, token_id in {**other_marks, **special_marks}.items()
            if mark in special_marks or (mark.startswith("<") and mark.endswith(">"))
        }
        self._mark = re.compile("|".join(f"({re.escape(mark)})" for mark in self._ids) or "(?!)")
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule; return its name.

        Args:
            name: its name; of several rules with one name the others get numbers.
            body: what it stands for.
            options: in brackets behind the name.
        """
        unique = f"{name}_{len(self._rules)}"
        self._rules[unique] = f"{unique}{options}: {body}"
        return unique

    def text(self, text: str) -> str:
        """What stands for a text, in which there may be special marks; "" for the empty text."""
        return " ".join(self._part(part) for part in self._mark.split(text) if part)

    def _part(self, part: str) -> str:
        if part in self._special_marks:
            return self._token(part)
        if part in self._ids:
            return f"({self._token(part)} | {quoted(part)})"
        return quoted(part)

    def _token(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>"

    def up_to(self, mark: str) -> str:
        """What stands for any text up to the first occurrence of a mark, and the mark."""
        # A rule that is lazy ends as early as it can.
        spelled = self.rule("free", f"/(?s:.*){_in_slashes(mark)}/", "[lazy]")
        if mark not in self._ids:
            return spelled
        # Ordinary tokens may spell a special one, too, and readers see no difference.
        before = self.rule("FREE", f"/(?s:.+)/ & ~/(?s:.*){_in_slashes(mark)}(?s:.*)/")
        return f"({spelled} | {before}? {self._token(mark)})"

    def json(self, schema: Mapping[str, Any]) -> str:
        """What stands for JSON of a schema."""
        written = {**with_patterns(schema), "x-guidance": _COMPACT}
        return self.rule("json", f"%json {json.dumps(written)}")

    def grammar(self, start: str) -> str:
        """The grammar whose texts are those of `start`."""
        return "\n".join([_HEADER, f"start: {start}", *self._rules.values(), ""])


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def _in_slashes(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")
