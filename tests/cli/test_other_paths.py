"""Paths that are not ASCII: of a model, in the commands and in a stub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.blank_checkpoint import write_checkpoint
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.cli.main import main
from naiad.cli.repository.model_entries import read_repository

LOCALES = [{"PYTHONUTF8": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
NAME = "Modèle ü 模型"
PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def create(checkpoint: Path, destination: Path) -> int:
    words = ["--model", str(checkpoint), "--name", "first", "--kv-cache-bytes", "1000", str(destination)]
    return main(["repository", "create", *words])


def in_locale(locale: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "naiad.cli.main", "repository", *words]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def not_utf8(folder: Path) -> Path:
    return Path(os.fsdecode(os.fsencode(folder) + b"/\xff"))


def name_model(repository: Path, before: bytes, after: bytes) -> None:
    """Put another path of the model into every configuration."""
    for config in repository.glob("*/config.pbtxt"):
        config.write_bytes(config.read_bytes().replace(before, after))


@pytest.mark.parametrize("locale", LOCALES)
def test_a_process_of_any_locale_reads_the_model_that_config_pbtxt_names(
    tmp_path: Path, locale: dict[str, str]
) -> None:
    """A stub's Python has the second one's file names: ASCII."""
    checkpoint = tmp_path / NAME
    write_checkpoint(checkpoint)
    write_tokenizer(checkpoint, byte_level_tokenizer())
    assert create(checkpoint, tmp_path / "repository") == 0
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from naiad.cli.repository.model_entries import read_model\n"
        "from naiad.config import ModelConfig\n"
        "from naiad.config.model_location import model_directory\n"
        "from naiad.tokenization.tokenizer import Tokenizer\n"
        "text = read_model(Path(sys.argv[1])).parameters['model_dir']\n"
        "folder = model_directory(text)\n"
        "ModelConfig.from_directory(str(folder))\n"
        "Tokenizer.from_directory(folder)\n"
        "print(sys.getfilesystemencoding(), text.encode().hex())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "repository" / "tokenizer")]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    encoding, text = done.stdout.split()
    assert encoding == ("ascii" if "LC_ALL" in locale else "utf-8")
    assert text == str(checkpoint.resolve()).encode().hex()


@pytest.mark.parametrize("locale", LOCALES)
def test_every_command_of_a_repository_writes_such_paths_in_any_locale(
    tmp_path: Path, locale: dict[str, str]
) -> None:
    checkpoint, repository = tmp_path / NAME, tmp_path / f"r {NAME}"
    write_checkpoint(checkpoint)
    options = ["--model", str(checkpoint), "--kv-cache-bytes", "1000", str(repository)]
    created = in_locale(locale, "create", "--name", "first", *options)
    name = f"r {NAME}"
    if "LC_ALL" in locale:
        name = name.encode("ascii", "backslashreplace").decode()
    assert f"wrote {tmp_path}/{name}/llm" in created.stdout.splitlines()
    assert f"warning: tritonserver can not take the path {tmp_path}/{name}, " in created.stderr
    in_locale(locale, "add", "--name", "second", *options)
    assert f"{tmp_path}/{name[2:]} on cpu" in in_locale(locale, "check", str(repository)).stdout
    removed = in_locale(locale, "remove", "--name", "second", str(repository))
    assert f"removed {tmp_path}/{name}/second_llm" in removed.stdout.splitlines()


def test_create_and_check_take_such_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / NAME
    write_checkpoint(checkpoint)
    assert create(checkpoint, tmp_path / "repository") == 0
    assert main(["repository", "check", str(tmp_path / "repository")]) == 0
    captured = capsys.readouterr()
    assert str(checkpoint) in captured.out
    assert captured.err == ""


def test_create_and_check_say_which_server_can_not_take_the_repositorys_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / NAME
    write_checkpoint(checkpoint)
    assert create(checkpoint, repository) == 0
    created = capsys.readouterr().err
    assert main(["repository", "check", str(repository)]) == 0
    assert created == capsys.readouterr().err
    assert f"warning: tritonserver can not take the path {repository}" in created
    assert "`naiad serve` serves it" in created


def test_every_command_refuses_a_path_that_is_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, link = not_utf8(tmp_path), tmp_path / "link"
    write_checkpoint(tmp_path / "checkpoint")
    link.symlink_to(tmp_path / "checkpoint")
    assert create(link, tmp_path / "repository") == 0
    write_checkpoint(checkpoint)
    assert create(checkpoint, tmp_path / "refused") == 1
    assert main(["serve", "--model", str(checkpoint), *PORTS]) == 1
    name_model(tmp_path / "repository", os.fsencode(tmp_path / "checkpoint"), os.fsencode(link))
    link.unlink()
    link.symlink_to(checkpoint)
    assert main(["repository", "check", str(tmp_path / "repository")]) == 1
    assert main(["serve", "--model-repository", str(tmp_path / "repository"), *PORTS]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert len(set(lines)) == 1
    assert lines[0].endswith("expected text in UTF-8; rename a directory whose name is not")
    assert not (tmp_path / "refused").exists()


def test_check_and_serve_refuse_a_configuration_that_is_not_utf8_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    repository = tmp_path / "repository"
    assert create(tmp_path / "checkpoint", repository) == 0
    name_model(repository, os.fsencode(tmp_path / "checkpoint"), os.fsencode(not_utf8(tmp_path)))
    assert main(["repository", "check", str(repository)]) == 1
    assert main(["serve", "--model-repository", str(repository), *PORTS]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    path = repository / "detokenizer" / "config.pbtxt"
    line = 1 + path.read_bytes().split(b"\xff")[0].count(b"\n")
    assert f"line {line} of {path} is not UTF-8; if it names a directory, rename that" in first


def test_a_repository_may_lie_where_the_path_is_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    repository = not_utf8(tmp_path)
    assert create(tmp_path / "checkpoint", repository) == 0
    assert f"wrote {tmp_path}/\\xff/llm" in capsys.readouterr().out.splitlines()
    assert main(["repository", "check", str(repository)]) == 0


def test_a_model_whose_name_the_server_can_not_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / "repository"
    write_checkpoint(checkpoint)
    assert create(checkpoint, repository) == 0
    (repository / "my notes").mkdir()
    read_repository(repository)
    assert main(["repository", "check", str(repository)]) == 1
    assert "the name of a model's directory = 'my notes': expected ASCII letters" in capsys.readouterr().err
