"""Served by a user without rights, where nothing can be written but a small /tmp."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from helpers import bare_machine
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Server, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def around(tmp_bytes: int, *shown: Path) -> list[str]:
    """The command that runs another on such a machine."""
    words = ["--tmp-bytes", str(tmp_bytes), "--shm-bytes", str(64 * MIB), "--descriptors", "256"]
    for path in (ROOT, *shown):
        words += ["--shown", str(path)]
    return ["unshare", "-m", sys.executable, str(Path(bare_machine.__file__)), *words, "--"]


def has_namespaces() -> bool:
    try:
        command = [*around(MIB), sys.executable, "-c", "import torch, naiad"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(
    not has_namespaces(), reason="a machine of its own needs mount namespaces and the right to mount"
)


def create(folder: Path, cpu_kernels: str) -> Path:
    """A repository that everybody may read."""
    (folder / "checkpoint").mkdir()
    checkpoint = tiny_checkpoint(folder / "checkpoint")
    create_repository(folder / "repository", checkpoint, "--cpu-kernels", cpu_kernels)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder / "repository"


def start(repository: Path, tmp_bytes: int) -> Server:
    options = ("--model-repository", str(repository), "--openai-port", "0")
    return start_repository(*options, around=around(tmp_bytes, repository.parent))


def expect_answers(server: Server) -> None:
    for model in ("text", "ensemble"):
        outcome = ask(server.grpc, model, text_inputs("Hello", 4, ignore_eos=True))
        assert not outcome.errors, outcome
        assert outcome.num_finals == 1
    body = json.dumps({"model": "first", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{server.openai}/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def fill(folder: Path) -> None:
    """Leave no room in this file system."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB))
    assert shutil.disk_usage(folder).free == 0


# The native kernels are compiled anew, as no compiled ones are found.
@pytest.mark.parametrize("cpu_kernels", ["torch", pytest.param("native", marks=pytest.mark.slow)])
def test_it_serves_and_stops(tmp_path: Path, cpu_kernels: str) -> None:
    server = start(create(tmp_path, cpu_kernels), 256 * MIB)
    try:
        status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "CapEff:\t0000000000000000" in status
        expect_answers(server)
        fill(Path(f"/proc/{server.process.pid}/root/tmp"))
        expect_answers(server)
    finally:
        code = server.stop()
    assert code == 0, server.lines


def test_without_room_for_its_files_the_start_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="naiad serve ended") as ended:
        start(create(tmp_path, "torch"), MIB // 4)
    assert "/tmp has 0 MiB free, the server needs 64 MiB: make room, or set TMPDIR" in str(ended.value)
