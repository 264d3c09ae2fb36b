from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from helpers.doc_names import ROOT

PAGE = ROOT / "docs" / "sampling.md"


def test_the_example_processor_prints_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(example)
    runpy.run_path(str(path))
    (said,) = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert capsys.readouterr().out.strip() == said
