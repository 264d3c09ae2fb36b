"""What the process that guards the server's directory clears away."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from naiad.cli.serve.server_guard import Guard
from naiad.engine_process import runtime_path


class ServerOfAUsedId(subprocess.Popen[bytes]):
    """Gets the process id of a server that was killed with its guard."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        directory = runtime_path(self.pid)
        directory.mkdir(mode=0o700)
        (directory / "gone.0.engine").touch()


def test_sockets_of_a_dead_server_with_the_same_process_id_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", ServerOfAUsedId)
        guard = Guard(["sleep", "60"])
    directory = runtime_path(guard._server.pid)
    try:
        assert not directory.exists()
    finally:
        assert guard.finish() != 0
    assert not directory.exists()
