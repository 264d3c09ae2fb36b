"""The parser of the command line: what is wrong is told in one line, with the remedy."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_MAX_NEAR = 3


class OneLineParser(argparse.ArgumentParser):
    """Takes no abbreviated options; parsers of commands are of this class too."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of an `ArgumentParser` by name."""
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the error and where to look, and exit with 2."""
        print(f"naiad: error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse words that are left over by the parser of the command that was given them."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown[0]))
        return parsed, unknown

    def _refusal(self, word: str) -> str:
        name = word.split("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        near = [option for option in options if option.startswith(name)] if name.startswith("--") else []
        if not near and name.startswith("-"):
            near = difflib.get_close_matches(name, options, n=1)
        if near:
            return f"{name} is no option of {self.prog}: did you mean {' or '.join(near[:_MAX_NEAR])}?"
        return f"{word!r} is not expected by {self.prog}"
