"""Files that users name: none is waited for, and none is read without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from naiad import small_file
from naiad.cli.control_key import control_key
from naiad.errors import StartupError
from naiad.line_file import prepare
from naiad.openai_server.access.key_file import read_key_file
from naiad.small_file import read_private_file, read_settings


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path, 0o600)
    return path


def test_a_file_is_read_with_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    path.chmod(0o640)
    assert read_private_file(path) == (b"text", 0o640)
    assert read_settings(path) == b"text"


def test_a_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_file, "MAX_BYTES", 3)
    path = tmp_path / "file"
    path.write_bytes(b"text")
    for read in (read_private_file, read_settings):
        with pytest.raises(OSError, match="larger than 3 bytes"):
            read(path)


def test_settings_may_be_a_pipe_but_have_an_end() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    assert read_settings(Path(f"/dev/fd/{reader}")) == b"text"
    os.close(reader)
    with pytest.raises(OSError, match="larger than"):
        read_settings(Path("/dev/zero"))


def test_a_pipe_that_nobody_writes_is_refused_as_keys(fifo: Path) -> None:
    with pytest.raises(StartupError, match="no regular file"):
        read_key_file(fifo)
    with pytest.raises(StartupError, match="no regular file"):
        control_key(fifo)


def test_a_pipe_that_nobody_reads_is_refused_as_a_log(fifo: Path) -> None:
    with pytest.raises(StartupError, match="--usage-file"):
        prepare("--usage-file", fifo)
