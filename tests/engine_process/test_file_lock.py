from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from naiad.engine_process.file_lock import FileLock


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.try_take()
    assert one.try_take()
    assert not other.try_take()
    other.release()
    assert not other.try_take()
    one.release()
    assert list(tmp_path.iterdir()) == []
    assert other.try_take()
    other.release()


def test_a_lock_outlives_nobody(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from naiad.engine_process.file_lock import FileLock\n"
        "lock = FileLock(Path(sys.argv[1])); os._exit(not lock.try_take())"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=True)
    assert (tmp_path / "lock").exists()
    lock = FileLock(tmp_path / "lock")
    assert lock.try_take()
    lock.release()


def test_without_its_directory_there_is_no_lock(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "gone" / "lock").try_take()


def test_who_takes_a_held_lock_waits_for_it(tmp_path: Path) -> None:
    holder, waiting = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    has_it = threading.Event()

    def wait() -> None:
        waiting.take()
        has_it.set()

    assert holder.try_take()
    thread = threading.Thread(target=wait)
    thread.start()
    assert not has_it.wait(0.1)
    holder.release()
    assert has_it.wait(10)
    thread.join()
    # The lock is on the file that exists now, not on the one that the holder removed.
    assert not holder.try_take()
    waiting.release()
    assert list(tmp_path.iterdir()) == []
