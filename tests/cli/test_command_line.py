"""What a wrong command line is told, and what a shell completes."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from naiad.cli.completion import SHELLS
from naiad.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The only line that is printed before the command ends with 2."""
    with pytest.raises(SystemExit, match="2"):
        main(list(words))
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("serve", "--max-num-sqs", "3"),
            "--max-num-sqs is no option of naiad serve: did you mean --max-num-seqs? "
            "(see `naiad serve --help`)",
        ),
        (("serve", "extra"), "'extra' is not expected by naiad serve (see `naiad serve --help`)"),
        (
            ("serve", "--model", ""),
            "argument --model: '': expected a name (see `naiad serve --help`)",
        ),
        (
            ("repository", "create", "x"),
            "the following arguments are required: --model, --name (see `naiad repository create --help`)",
        ),
        ((), "the following arguments are required: COMMAND (see `naiad --help`)"),
    ],
)
def test_a_wrong_word_is_told_in_one_line_with_the_remedy(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words) == f"naiad: error: {line}"


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    call = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _naiad; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{call}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "naiad", "se") == ["serve"]
    assert completed(script, "naiad", "repository", "c") == ["create", "check"]
    assert completed(script, "naiad", "serve", "--model-r") == ["--model-repository"]
    assert completed(script, "naiad", "serve", "--model-control-mode", "") == ["none", "explicit"]
    # File names are the shell's own business.
    assert completed(script, "naiad", "serve", "--model-repository", "x") == []
    assert "--kv-cache-bytes" in completed(script, "naiad", "repository", "create", "--kv")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_takes_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--model-control-mode" in script or "-l model-control-mode" in script
    program = shutil.which(shell)
    if program is None:
        return
    subprocess.run([program, "-n", "-c", script], check=True)
