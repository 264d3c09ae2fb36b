"""Repositories, models and temporary directories with spaces and letters that are not ASCII."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.model_control import control_client
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, Server, running
from helpers.tiny_repository import create_repository, tiny_checkpoint

ODD = "my Modèle (ü)"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, its checkpoint and TMPDIR, all in places that the server can not take."""
    folder = tmp_path / ODD
    for name in ("temporary", "checkpoint"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    monkeypatch.setenv("LC_ALL", "C")
    create_repository(folder / "repository", tiny_checkpoint(folder / "checkpoint"))
    return folder / "repository"


def answers(server: Server) -> bool:
    outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 4, ignore_eos=True))
    return not outcome.errors and not outcome.call_error and outcome.num_finals == 1


def test_they_are_served(repository: Path, leaving: Leaving) -> None:
    with running(leaving, repository) as server:
        assert answers(server)
        assert any("its temporary files go to" in line for line in server.lines)


def test_they_are_served_under_explicit_model_control(
    repository: Path, leaving: Leaving, tmp_path: Path
) -> None:
    options = ("--model-control-mode", "explicit", "--model-control-key", str(tmp_path / "key"))
    with running(leaving, repository, *options) as server:
        with control_client(server.grpc, tmp_path / "key") as client:
            client.unload_model("text")
            client.load_model("text")
        assert answers(server)
