"""What is told of a schema whose process ends without figures."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from perf.engine.schema_bench import Case, Figures, measure

from helpers.tiny_tokenizers import byte_level_tokenizer


class EndingLibrary:
    """Ends its process by a signal, or by an error that is no refusal."""

    name = "ending"

    def __init__(self, number: int) -> None:
        self._number = number

    def compile(self, schema: str) -> Any:
        if self._number:
            os.kill(os.getpid(), self._number)
        raise KeyError(schema)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGXCPU, Figures(num_without_end=1)),
        (signal.SIGKILL, Figures(num_without_end=1)),
        (signal.SIGTERM, Figures(num_crashed=1)),
        (0, Figures(num_crashed=1)),
    ],
)
def test_a_crash_is_not_past_the_limit(number: int, expected: Figures) -> None:
    tokenizer: Any = byte_level_tokenizer()
    found = measure(EndingLibrary(number), [Case("group", "{}", "")], tokenizer, limit_s=60)
    assert found == expected
    row = found.row("group", "ending")
    assert (row["past the limit"], row["crashed"]) == (expected.num_without_end, expected.num_crashed)
