"""Each of the sixty faults has tests: `pytest --fault N` runs those of number N."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers.fault_rows import PAGE, ROOT, fault_rows, named_functions

NUMBERS = range(1, 61)


def test_every_fault_has_a_row() -> None:
    assert sorted(fault_rows()) == list(NUMBERS)


def test_every_file_that_a_row_names_is_among_its_tests() -> None:
    rows, num_named = fault_rows(), 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+) \|", line):
            named = re.findall(r"`([^`]*test_\w+\.py)`", line)
            found = [path.relative_to(ROOT).as_posix() for path in rows[int(row[1])]]
            assert len(found) == len(named), f"row {row[1]} names {named}, but its tests are {found}"
            for name, path in zip(named, found, strict=True):
                assert f"/{path}".endswith(f"/{name}"), f"row {row[1]}: no file {name}"
            num_named += len(named)
    assert num_named >= len(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_row_has_tests(number: int) -> None:
    texts = [path.read_text(encoding="utf-8") for path in fault_rows()[number]]
    assert texts, f"row {number} of {PAGE.name} names no file of tests"
    assert all("\ndef test_" in text for text in texts)
    for name in named_functions()[number]:
        assert any(f"\ndef {name}(" in text for text in texts), f"row {number}: {name} is not there"


def test_the_tests_of_a_fault_are_chosen_by_its_number() -> None:
    files = ["tests/faults/test_tokens.py", "tests/faults/test_clock.py", "tests/faults/test_detokenizer.py"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", *files]
    done = subprocess.run(
        [*command, "--fault", "53", "--fault", "51"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    chosen = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert chosen == {"tests/faults/test_tokens.py", "tests/faults/test_clock.py"}
