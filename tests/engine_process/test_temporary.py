"""The directory for temporary files does not depend on whether there is room in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from naiad.temporary import temporary_directory


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP", ""])
@pytest.mark.parametrize("exists", [True, False])
def test_it_is_the_one_that_tempfile_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, exists: bool
) -> None:
    if name:
        monkeypatch.setenv(name, str(tmp_path if exists else tmp_path / "missing"))
    assert temporary_directory() == Path(tempfile.gettempdir())
    assert (temporary_directory() == tmp_path) == (bool(name) and exists)


def test_a_full_one_stays_the_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`tempfile` finds out by writing, and would choose another directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/elsewhere")
    assert temporary_directory() == tmp_path
