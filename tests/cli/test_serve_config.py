"""Options in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from naiad.cli.dispatch import _expanded
from naiad.cli.main import main
from naiad.cli.serve.config_file import tomllib


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    """What `--print-config` prints, read as TOML."""
    assert main(["serve", "--print-config", *options]) == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(
        'model = "org/näme"\nmax-num-seqs = 7\nkv-cache-memory-fraction = 0.5\nstart-cache = false\n'
        'openai-lenient = true\nmetrics-open = false\nopenai-allowed-host = ["a.example", "b.example"]\n'
        'openai-port = "off"\n',
        encoding="utf-8",
    )
    return path


def test_each_kind_of_option_is_read_and_printed_again(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = printed(capsys, "--config", str(file))
    expected = {
        "model": "org/näme",
        "max-num-seqs": 7,
        "kv-cache-memory-fraction": 0.5,
        "start-cache": False,
        "openai-lenient": True,
        "metrics-open": False,
        "openai-allowed-host": ["a.example", "b.example"],
        "openai-port": "off",
        "http-port": 8000,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert main(["serve", "--print-config", "--config", str(file)]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    assert printed(capsys, "--config", str(again)) == values


def test_what_nobody_set_is_a_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"# model =", "# openai-port =", "# dtype =", "# openai-allowed-host ="} <= set(lines)


def test_the_command_line_goes_first(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-num-seqs=3", "--openai-allowed-host", "c.example", f"--config={file}"]
    values = printed(capsys, *options)
    assert (values["max-num-seqs"], values["openai-allowed-host"]) == (3, ["c.example"])


@pytest.mark.parametrize("option", ["--conf", "--openai-allowed-h=c.example"])
def test_the_beginning_of_an_option_is_none(
    file: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a file would not be read, and such a list would not replace the file's."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--print-config", option, "--config", str(file)])
    assert f"{option.split('=')[0]} is no option of naiad serve: did you mean --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-num-seq = 3", "max-num-seq = 3: expected max-num-seqs instead"),
        ("model = true", "model = True: expected a string or a number"),
        ("[engine]\ndtype = 'float32'", "engine = {'dtype': 'float32'}: expected an option's name"),
        ("openai-lenient = 'yes'", "openai-lenient = 'yes': expected true or false"),
        ("openai-allowed-host = 'x'", "openai-allowed-host = 'x': expected a list of strings"),
        ("model = ", "is not TOML: "),
        (f"model = {'[' * 5000}", "is not TOML: it is nested too deeply"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(
    tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert reason in error
    assert error.count("\n") == 1


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/no/such.toml"]) == 1
    assert "--config /no/such.toml can not be read: No such file" in capsys.readouterr().err


def test_a_wrong_value_in_the_file_is_refused_as_the_options_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("http-port = 70000")
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--config", str(path)])
    assert "argument --http-port: '70000': expected a port" in capsys.readouterr().err


def test_other_commands_have_no_such_file() -> None:
    assert _expanded(["repository", "check", "x"]) == ["repository", "check", "x"]
