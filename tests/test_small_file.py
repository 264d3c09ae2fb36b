"""Files that users name: none is waited for, and none is read without end."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from naiad import small_file
from naiad.cli.control_key import control_key
from naiad.errors import StartupError
from naiad.line_file import append, prepare
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


def test_lines_that_a_process_may_not_write_whole_leave_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, b"first\n")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        with pytest.raises(OSError, match="disk is full"):
            append(path, b"second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"first\n"


def test_a_part_stays_that_others_have_written_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "lines", os.write

    def write_a_part(opened: int, lines: bytes) -> int:
        num_written = write(opened, lines[:3])
        with path.open("ab") as other:
            other.write(b"other\n")
        return num_written

    monkeypatch.setattr(os, "write", write_a_part)
    with pytest.raises(OSError, match="disk is full"):
        append(path, b"second\n")
    assert path.read_bytes() == b"secother\n"


def test_a_pipe_that_takes_a_part_is_told(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(os, "write", lambda opened, lines: len(lines) - 1)
    with pytest.raises(OSError, match="seek"):
        append(fifo, b"line\n")
    os.close(reader)
