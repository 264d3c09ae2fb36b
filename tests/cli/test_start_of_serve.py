"""What `naiad serve` says and does about each start of its server; no server runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.blank_checkpoint import write_checkpoint
from naiad.cli.main import main
from naiad.cli.serve import supervisor
from naiad.cli.serve.stop_signal import StopSignal
from naiad.cli.serve.supervisor import ServerPlan

# The server is never started.
OPTIONS = ("--tritonserver", "/bin/true", "--openai-port", "off", "--gate", "off")
PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
LARGE = 2 << 20

Serve = Callable[..., int]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def repository(tmp_path: Path, checkpoint: Path) -> Path:
    """A repository with a file that is too large to be copied."""
    folder = tmp_path / "repository"
    words = ["--model", str(checkpoint), "--name", "first", "--kv-cache-bytes", "1000", str(folder)]
    assert main(["repository", "create", *words]) == 0
    (folder / "llm" / "1" / "large.bin").write_bytes(b"1" * LARGE)
    return folder


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `naiad serve` with these options; before each restart of its server the next event happens."""

    def run(*options: str, events: tuple[Callable[[], object], ...] = ()) -> int:
        class Supervisor:
            def __init__(self, plan: ServerPlan, stop: StopSignal, announce: Callable[[], None]) -> None:
                self._plan = plan

            def run(self) -> int:
                commands = [self._plan.command()]
                for happen in events:
                    happen()
                    commands.append(self._plan.command())
                assert all(each[0] == "/bin/true" for each in commands)
                # Triton's HTTP server takes no names.
                addresses = {word.split("=")[1] for word in commands[0] if "-address=" in word}
                assert addresses == {"127.0.0.1"}
                return 0

        monkeypatch.setattr(supervisor, "Supervisor", Supervisor)
        return main(["serve", *OPTIONS, *PORTS, *options])

    return run


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [
        line.split(" WARNING naiad: ", 1)[1]
        for line in capsys.readouterr().err.splitlines()
        if " WARNING " in line
    ]


def test_a_restart_tells_what_of_the_repository_has_changed(
    serve: Serve, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = repository / "llm" / "1" / "large.bin"

    def write_into() -> None:
        with path.open("ab") as file:
            file.write(b"2")

    events = (lambda: None, write_into, lambda: None)
    assert serve("--model-repository", str(repository), events=events) == 0
    (line,) = warnings(capsys)
    assert "large.bin has changed since the start" in line


def test_a_restart_without_a_file_of_the_repository_ends_with_its_path(
    serve: Serve,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = repository / "llm" / "1" / "large.bin"
    monkeypatch.setattr("os.link", _refuse)
    assert serve("--model-repository", str(repository), events=(lambda: None, path.unlink)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("naiad: error: ")
    assert f"{path} is gone since the start" in last


def _refuse(*_: object) -> None:
    """As between two file systems."""
    raise OSError(18, "Invalid cross-device link")


def test_a_chat_template_that_does_not_compile_is_told(
    serve: Serve, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% for message in %}")
    assert serve("--model", str(checkpoint)) == 0
    (line,) = warnings(capsys)
    assert line.startswith("the chat template of llm does not compile, so chats are refused: ")


def test_a_name_as_the_host_is_an_address_for_triton(serve: Serve, checkpoint: Path) -> None:
    assert serve("--model", str(checkpoint), "--host", "localhost") == 0


def test_explicit_model_control_is_told_to_be_code_of_clients(
    serve: Serve, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("--model-repository", str(repository)) == 0
    assert warnings(capsys) == []
    assert serve("--model-repository", str(repository), "--model-control-mode", "explicit") == 0
    (line,) = warnings(capsys)
    assert line == (
        "with --model-control-mode explicit whoever has the key of model control can run their own code on "
        "this machine"
    )


def test_the_help_says_that_explicit_model_control_runs_code_of_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "clients that have the key may load and unload models, and so run their own code on this machine"
        in text
    )
