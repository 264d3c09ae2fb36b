from __future__ import annotations

from pathlib import Path

import pytest

from helpers.doc_names import ROOT, Page, missing_names, pages, uneven_rows


def page(text: str) -> Page:
    return Page(ROOT / "docs" / "made_up.md", text)


@pytest.mark.parametrize("each", pages(), ids=lambda each: str(each.path.relative_to(ROOT)))
def test_every_name_on_the_page_exists(each: Page) -> None:
    assert missing_names(each) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `backend_src/naiad/gone.py`", "backend_src/naiad/gone.py"),
        ("see `gone.py`", "gone.py"),
        ("see [this](gone.md)", "gone.md"),
        ("see [this](gone.md#part)", "gone.md#part"),
        ("see [this](glossary.md#gone)", "glossary.md#gone"),
        ("# Here\nsee [this](#gone)", "#gone"),
        ("`python -m naiad.gone.module`", "naiad.gone.module"),
        ("`naiad.errors.GoneError`", "naiad.errors.GoneError"),
        ("`perf.gone.throughput`", "perf.gone.throughput"),
        ("`make gone`", "make gone"),
        ("```\nmake gone-too\n```", "make gone-too"),
        ("`--gone-option`", "--gone-option"),
        ("```\nnaiad serve \\\n  --max-tokens 5\n```", "--max-tokens"),
        ('`make serve ARGS="--gone 5"`', "--gone"),
        ('`python -m naiad_client "x" --max-num-seqs 3`', "--max-num-seqs"),
        ("`naiad bench throughput --gone`", "--gone"),
        ("`GoneClass`", "GoneClass"),
        ("`gone_function_name`", "gone_function_name"),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, missing: str) -> None:
    assert missing_names(page(text)) == [missing]


@pytest.mark.parametrize(
    "text",
    [
        "`backend_src/naiad/errors.py` and `docs/` and `model_repository/*/config.pbtxt`",
        "`naiad.engine_process` and `naiad.errors.ConfigError`",
        '`make serve ARGS="--max-num-seqs 4"`',
        '`python -m naiad_client "x" --chat`',
        "`org/name` and `/v2/health/ready` and `temperature`",
        "[a page](https://example.org/x) and [ours](../README.md)",
        "## What `X` does\nsee [above](#what-x-does) and [more](compatibility.md#behaviour-in-detail)",
    ],
)
def test_names_that_exist_pass(text: str) -> None:
    assert missing_names(page(text)) == []


@pytest.mark.parametrize("each", pages(), ids=lambda each: str(each.path.relative_to(ROOT)))
def test_the_rows_of_a_table_have_equally_many_cells(each: Page) -> None:
    assert uneven_rows(each) == []


def test_a_row_with_another_number_of_cells_is_found() -> None:
    rows = ["| a | b |", "|---|---|", "| 1 \\| 2 | 3 |", "| 1 | 2 | 3 |"]

    assert uneven_rows(page("\n".join(rows))) == ["| 1 | 2 | 3 |"]


def test_every_page_is_read() -> None:
    read = {each.path for each in pages()}

    assert set((ROOT / "docs").rglob("*.md")) | {ROOT / "README.md"} <= read
    assert Path(ROOT / "docs" / "glossary.md") in read
