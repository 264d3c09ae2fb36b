"""Paths that the server can not take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from naiad.cli.plain_paths import is_plain
from naiad.cli.serve.server_paths import plain_repository, use_plain_temporary_directory
from naiad.errors import StartupError

ODD = ["with space", "ü", "a;b", "$(id)", "a'b", 'a"b', "a&b", "a\nb", "~x", "*"]


@pytest.mark.parametrize("name", ODD)
def test_what_a_shell_would_split_or_expand_is_not_plain(name: str) -> None:
    assert not is_plain(Path("/models") / name)


def test_usual_paths_are_plain() -> None:
    assert is_plain(Path("/home/me/.cache/models--org--name/v1.0_x+y@z"))


def test_a_shell_takes_every_plain_character_as_it_is() -> None:
    """The server passes paths to `bash -c` without quotes."""
    plain = "".join(chr(code) for code in range(33, 127) if is_plain(Path(chr(code))) or chr(code) == "/")
    word = f"/x{plain}"
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True)
    assert done.stdout == word


def test_a_plain_temporary_directory_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert use_plain_temporary_directory() == tmp_path


def test_another_temporary_directory_holds_for_this_process_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / "with space"
    odd.mkdir()
    monkeypatch.setenv("TMPDIR", str(odd))
    monkeypatch.setattr(tempfile, "tempdir", None)
    chosen = use_plain_temporary_directory()
    assert is_plain(chosen)
    assert Path(tempfile.gettempdir()) == chosen
    script = "import tempfile; print(tempfile.gettempdir())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{chosen}\n"


def test_without_any_plain_directory_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / "ä"
    odd.mkdir()
    monkeypatch.setenv("TMPDIR", str(odd))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StartupError, match=r"TMPDIR = .*ä.*: the server can not take this path"):
        use_plain_temporary_directory()


def test_a_repository_with_an_odd_path_is_reached_by_a_link(tmp_path: Path) -> None:
    source = tmp_path / "my models"
    source.mkdir()
    (source / "llm").mkdir()
    link = plain_repository(source, tmp_path / "repository")
    assert link == tmp_path / "repository"
    assert (link / "llm").is_dir()
    assert plain_repository(link, tmp_path / "other") == link
