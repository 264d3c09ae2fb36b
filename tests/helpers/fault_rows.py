"""The table of sixty faults in docs/reliability.md: which tests show what comes of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
_ROW = re.compile(r"^\| (\d+) \|.*\|([^|]*)\|$", re.MULTILINE)
_FILE = re.compile(r"`(?:tests/(?:\w+/)*)?(test_\w+\.py)`")
_FUNCTION = re.compile(r"`(test_\w+)`")


def fault_rows() -> Mapping[int, tuple[Path, ...]]:
    """Number of each fault → the files of its tests."""
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    return {
        int(row[1]): tuple(files[name] for name in _FILE.findall(row[2]) if name in files)
        for row in _ROW.finditer(PAGE.read_text(encoding="utf-8"))
    }


def named_functions() -> Mapping[int, tuple[str, ...]]:
    """Number of each fault → the tests that its row names beside their files."""
    text = PAGE.read_text(encoding="utf-8")
    return {int(row[1]): tuple(_FUNCTION.findall(row[2])) for row in _ROW.finditer(text)}
