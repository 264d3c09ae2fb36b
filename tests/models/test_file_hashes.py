"""Hashes are remembered only while a file is certainly the same."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from naiad.models import file_hashes
from naiad.models.file_hashes import FileHashes

CONTENT = bytes(range(256)) * 9000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remembered(path: Path) -> FileHashes:
    """Hashes of another process, which has hashed the file long after its last change."""
    memory = path.with_name("memory")
    hashes = FileHashes(None)
    hashes.sha256(path)
    hashes.save(memory, 0o600)
    return FileHashes(memory)


def test_hashes_are_those_of_the_bytes_from_the_start_on(path: Path) -> None:
    hashes = FileHashes(None)
    for start in (0, 1, 4096, len(CONTENT)):
        assert hashes.sha256(path, start) == digest(CONTENT[start:])


def test_an_untouched_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "_CLOCK_TICK_NS", -(1 << 60))
    hashes = remembered(path)
    monkeypatch.setattr(file_hashes, "_sha256", None)
    assert hashes.sha256(path) == digest(CONTENT)


def test_a_file_that_was_just_written_is_not_remembered(path: Path) -> None:
    assert not remembered(path)._known
    assert not path.with_name("memory").exists()


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def replace(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


@pytest.mark.parametrize("change", [write, replace])
def test_any_change_is_seen_whatever_the_time_of_modification_says(
    path: Path, change: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "_CLOCK_TICK_NS", -(1 << 60))
    hashes, before = remembered(path), path.stat()
    time.sleep(0.05)  # longer than a tick of the file system's clock
    changed = b"x" + CONTENT[1:]
    change(path, changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashes.sha256(path) == digest(changed)


@pytest.mark.parametrize("content", [b"", b"{", b'{"file+0": 3}', b"\xff\xfe", b'{"\xff": 1}'])
def test_a_damaged_memory_is_an_empty_one(path: Path, content: bytes) -> None:
    memory = path.with_name("memory")
    memory.write_bytes(content)
    assert FileHashes(memory).sha256(path) == digest(CONTENT)


def test_a_file_of_ones_own_is_not_read_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = FileHashes(None)
    hashes.remember(path, 4096, digest(CONTENT[4096:]))
    with monkeypatch.context() as patch:
        patch.setattr(file_hashes, "_sha256", None)
        assert hashes.sha256(path, 4096) == digest(CONTENT[4096:])
    path.write_bytes(bytes(len(CONTENT)))
    assert hashes.sha256(path, 4096) == digest(bytes(len(CONTENT) - 4096))
