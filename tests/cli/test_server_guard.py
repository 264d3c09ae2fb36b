"""What the process that guards the server's directory clears away."""

from __future__ import annotations

import os

import pytest

from naiad.cli.serve import server_guard
from naiad.cli.serve.server_guard import Guard
from naiad.engine_process import runtime_path


def test_sockets_of_a_dead_server_with_the_same_process_id_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = server_guard._prepare

    def prepare_one_with_a_used_id() -> None:
        directory = runtime_path(os.getpid())
        directory.mkdir(mode=0o700)
        (directory / "gone.0.engine").touch()
        prepare()

    monkeypatch.setattr(server_guard, "_prepare", prepare_one_with_a_used_id)
    guard = Guard(["sleep", "60"])
    directory = runtime_path(guard._server.pid)
    try:
        assert not directory.exists()
    finally:
        assert guard.finish() != 0
    assert not directory.exists()
