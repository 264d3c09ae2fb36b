"""`naiad serve` before any server runs: its options and the messages of refusals."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.blank_checkpoint import write_checkpoint
from naiad import __version__
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.console import say, say_error
from naiad.cli.main import main
from naiad.cli.repository.check import with_directories
from naiad.cli.repository.model_entries import read_repository
from naiad.cli.repository.served_models import served_models
from naiad.cli.serve.command import _announce, _check_fallbacks
from naiad.cli.serve.supervisor import _show
from naiad.config.engine_config import field_names
from naiad.errors import ConfigError
from naiad.openai_server.fallbacks import Fallbacks


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"naiad {__version__}\n"


def test_every_engine_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in field_names():
        assert ("--model" if name == "model_dir" else "--" + name.replace("_", "-")) in text


def test_help_and_checks_load_no_torch() -> None:
    script = (
        "import sys\nfrom naiad.cli.main import main\n"
        "code = main(['serve', '--model', '/no/such/model', '--http-port', '0'])\n"
        "sys.exit(100 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 1


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The single line that `naiad serve` prints before it exits with 1."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert main(["serve", *ports, *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("naiad: error: ")
    return lines[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"--grpc-port {port} on 127.0.0.1" in refusal(capsys, "--grpc-port", port)


def test_the_same_port_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--grpc-port = 8123" in refusal(capsys, "--http-port", "8123", "--grpc-port", "8123")


def test_a_truncated_model(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refusal(capsys, "--model", str(model))


def test_an_unsupported_model(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "GPT2LMHeadModel" in refusal(capsys, "--model", str(model))


def test_a_setting_out_of_range(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert "block_size = 5" in refusal(capsys, "--model", str(model), "--block-size", "5")


def test_more_cache_than_memory(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    text = refusal(capsys, "--model", str(model), "--kv-cache-bytes", str(1 << 50))
    assert "GiB of memory are available" in text


def test_no_such_server(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    text = refusal(capsys, "--model", str(model), "--tritonserver", "/no/such/tritonserver")
    assert "--tritonserver /no/such/tritonserver" in text


@pytest.fixture
def two_models(tmp_path: Path, model: Path) -> Path:
    """A repository of two models with budgets; the checkpoint has its own length limit."""
    folder = tmp_path / "repository"
    for action, name in (("create", "first"), ("add", "second")):
        words = ["--model", str(model), "--name", name, "--kv-cache-bytes", "1000", str(folder)]
        assert main(["repository", action, *words]) == 0
    return folder


def test_budgets_of_several_models_add_up(capsys: pytest.CaptureFixture[str], two_models: Path) -> None:
    capsys.readouterr()
    budget = str(1 << 50)
    text = refusal(capsys, "--model-repository", str(two_models), "--kv-cache-bytes", budget)
    assert f"these 2 models need {2 * (1 << 20) + 2}.0 GiB" in text


def test_a_model_among_others_needs_a_budget(capsys: pytest.CaptureFixture[str], two_models: Path) -> None:
    capsys.readouterr()
    text = refusal(capsys, "--model-repository", str(two_models), "--kv-cache-bytes", "0")
    assert "kv_cache_bytes of llm = 0" in text


@pytest.mark.parametrize(("options", "called"), [((), "draft_model"), (("--draft-model",), "--draft-model")])
def test_a_draft_model_that_is_not_there_is_called_as_the_user_did(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, options: tuple[str, ...], called: str
) -> None:
    folder = tmp_path / "repository"
    words = ["--model", str(model), "--name", "first", "--draft-model", str(model), str(folder)]
    assert main(["repository", "create", *words, "--drafter", "draft_model"]) == 0
    capsys.readouterr()
    none = str(tmp_path / "none")
    config = folder / "llm" / "config.pbtxt"
    old = config.read_text()
    place = old.index('"draft_model"')
    config.write_text(old[:place] + old[place:].replace(str(model), none, 1))
    given = [word for option in options for word in (option, none)]
    text = refusal(capsys, "--model-repository", str(folder), *given)
    assert f"naiad: error: {called} {none}: no such directory" in text


def test_one_model_does_not_replace_several(
    capsys: pytest.CaptureFixture[str], two_models: Path, model: Path
) -> None:
    capsys.readouterr()
    text = refusal(capsys, "--model-repository", str(two_models), "--model", str(model))
    assert "expected none: each of the 2 engines names its model" in text


def test_a_repository_that_is_served_itself_takes_no_options(
    capsys: pytest.CaptureFixture[str], two_models: Path
) -> None:
    capsys.readouterr()
    words = ("--model-repository", str(two_models), "--model-control-mode", "explicit", "--dtype", "float32")
    assert "no options for dtype: the repository is served as it is, so set" in refusal(capsys, *words)


@pytest.mark.parametrize("pair", ["first=third", "third=first", "llm=second"])
def test_a_fallback_names_models_that_are_served(
    capsys: pytest.CaptureFixture[str], two_models: Path, pair: str
) -> None:
    capsys.readouterr()
    text = refusal(capsys, "--model-repository", str(two_models), "--openai-fallback", pair)
    assert f"--openai-fallback = '{pair}': expected MODEL=OTHER, two of the names first, second" in text


def test_two_models_of_one_name_are_told_apart_by_their_engines(
    capsys: pytest.CaptureFixture[str], two_models: Path
) -> None:
    entries = [
        replace(entry, parameters={**entry.parameters, "served_name": ""}) if entry.is_engine else entry
        for entry in with_directories(read_repository(two_models), resolve_model)
    ]
    for pair in ("model=second_llm", "llm=model"):
        fallbacks = Fallbacks.parse("--openai-fallback", [pair])
        _check_fallbacks(fallbacks, entries, may_others_come=False)
    with pytest.raises(ConfigError, match="two of the names llm, model, second_llm"):
        _check_fallbacks(Fallbacks({"model": "second"}), entries, may_others_come=False)


def test_a_fallback_may_name_a_model_that_is_loaded_later(
    capsys: pytest.CaptureFixture[str], two_models: Path
) -> None:
    capsys.readouterr()
    entries = read_repository(two_models)
    _check_fallbacks(Fallbacks({"first": "third"}), entries, may_others_come=True)
    _check_fallbacks(Fallbacks({"first": "second"}), entries, may_others_come=True)
    assert capsys.readouterr().err == (
        "naiad: warning: --openai-fallback first=third: 'third' is no model now (the models are first, "
        "second), until a client loads it\n"
    )


@pytest.mark.parametrize("options", [["--http-port", "70000"], ["--max-num-seqs", "-1"], ["--surprise"]])
def test_options_that_make_no_sense_are_refused_by_name(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_key_of_model_control_without_model_control_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    text = refusal(capsys, "--model", str(model), "--model-control-key", "file")
    assert "--model-control-key = 'file': expected --model-control-mode explicit with it" in text


def test_the_hint_names_the_first_model_whatever_the_names_are(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    for action, name in (("create", "chatty"), ("add", "another")):
        words = ["--model", str(model), "--name", name, "--kv-cache-bytes", "1000", str(folder)]
        assert main(["repository", action, *words]) == 0
    capsys.readouterr()
    first = served_models(read_repository(folder))[0]
    _announce("127.0.0.1", {"grpc": 2, "metrics": 3, "http": 1}, None, first)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ready: http=127.0.0.1:1 grpc=127.0.0.1:2 metrics=127.0.0.1:3"
    assert "Ask chatty something:" in lines
    assert any("/v2/models/ensemble/generate_stream" in line for line in lines)
    assert not any("another" in line for line in lines)


class Pieces(io.StringIO):
    """A stream that remembers what it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_no_line_of_the_server_can_come_into_the_middle_of_one(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """With PYTHONUNBUFFERED each piece goes alone into the pipe that the server writes to as well."""
    repository = tmp_path / "made"
    assert main(["repository", "create", "--model", str(model), "--name", "chatty", str(repository)]) == 0
    out, err = Pieces(), Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    first = served_models(read_repository(repository))[0]
    _announce("127.0.0.1", {"grpc": 2, "metrics": 3, "http": 1}, "127.0.0.1:4", first)
    say("a message")
    say_error(ConfigError("--port", "0", "another"))
    _show("a line of the server")
    assert len(out.pieces) == 1
    assert len(err.pieces) == 3
    assert all(piece.endswith("\n") for piece in (*out.pieces, *err.pieces))
