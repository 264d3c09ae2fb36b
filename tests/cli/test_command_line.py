"""What a wrong command line is told, and what a shell completes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
        (
            ("serve", "--print-config", "--conf", "serve.toml"),
            "--conf is no option of naiad serve: did you mean --config? (see `naiad serve --help`)",
        ),
        (
            ("serve", "--openai-allowed=x"),
            "--openai-allowed is no option of naiad serve: did you mean --openai-allowed-host or "
            "--openai-allowed-origin? (see `naiad serve --help`)",
        ),
        (
            ("repository", "create", "x", "--model", "y", "--na", "z", "--name", "z"),
            "--na is no option of naiad repository create: did you mean --name? "
            "(see `naiad repository create --help`)",
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


# Of the last word of a command line, with what a shell offers for it in any order.
OFFERED: list[tuple[tuple[str, ...], set[str]]] = [
    (("se",), {"serve"}),
    (("repository", "c"), {"create", "check"}),
    (("serve", "--model-r"), {"--model-repository"}),
    (("serve", "--model-control-mode", ""), {"none", "explicit"}),
    (("repository", "create", "--kv-cache-b"), {"--kv-cache-bytes"}),
]


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_that_is_installed_takes_its_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(shell, capsys)
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", "-c", script], check=True)


def test_the_script_for_zsh_is_that_for_bash_without_what_zsh_reads_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, for_bash = script_of("zsh", capsys), script_of("bash", capsys)
    begin, _, rest = script.partition("_naiad() {\n")
    assert "_naiad() {\n" + rest == for_bash
    assert begin.splitlines()[-1] == "autoload -U +X bashcompinit && bashcompinit"
    # A letter after the colon is a modifier, and these variables are the search path and the completed line.
    assert re.findall(r"\$\{[^}]*:[A-Za-z]", rest) == []
    assert re.findall(r"\b(?:path|words|status|argv)\b", re.sub(r"'[^']*'", "", rest)) == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(("words", "offered"), OFFERED)
def test_zsh_completes(words: tuple[str, ...], offered: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("zsh", capsys)
    quoted = " ".join(f"'{word}'" for word in ("naiad", *words))
    # As `bashcompinit` calls it; what does not begin with the word is left out only later, by `compadd`.
    call = 'emulate -L sh; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _naiad; print -rl -- "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["zsh", "-f", "-c", f"{script}\nask() {{ {call}; }}\nask {quoted}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert {each for each in done.stdout.split() if each.startswith(words[-1])} == offered


def fish_words(line: str) -> list[str]:
    """The words of a line as fish reads them, of which only single quotes are used."""
    words, at = [], 0
    while at < len(line):
        if line[at] == "'":
            match = re.compile(r"'((?:[^'\\]|\\['\\])*)'").match(line, at)
            assert match is not None, line
            words.append(re.sub(r"\\(['\\])", r"\1", match[1]))
        else:
            match = re.compile(r"[A-Za-z0-9_-]+").match(line, at)
            assert match is not None, line
            words.append(match[0])
        at = match.end()
        assert line[at : at + 1] in ("", " "), line
        at += 1
    return words


def holds(condition: str, seen: tuple[str, ...]) -> bool:
    """Whether a condition of the script holds when these words have been written."""
    for part in condition.split("; and "):
        negated, _, rest = part.rpartition("not ")
        name, *names = rest.split(" ")
        assert (name, names) == ("true", []) or (name == "__fish_seen_subcommand_from" and names), part
        if name != "true" and bool(set(names) & set(seen)) == (negated != "" or part.startswith("not ")):
            return False
    return True


def fish_offers(script: str, words: tuple[str, ...]) -> set[str]:
    """What the lines of the script offer for the last word."""
    offered: set[str] = set()
    for line in script.splitlines():
        begin, rest = fish_words(line)[:5], fish_words(line)[5:]
        assert begin[:4] == ["complete", "-c", "naiad", "-n"], line
        known, flags = {}, set()
        while rest:
            flag = rest.pop(0)
            if flag in ("-f", "-x", "-r"):
                flags.add(flag)
            else:
                assert flag in ("-a", "-d", "-l", "-s"), line
                known[flag] = rest.pop(0)
        if not holds(begin[4], words[:-1]):
            continue
        option = f"--{known['-l']}" if "-l" in known else f"-{known['-s']}" if "-s" in known else ""
        if option and len(words) > 1 and words[-2] == option:
            return set(known.get("-a", "").split())
        offered |= {option} if option else {known["-a"]}
    return {each for each in offered if each.startswith(words[-1])}


@pytest.mark.parametrize(("words", "offered"), OFFERED)
def test_the_lines_for_fish_offer_the_same(
    words: tuple[str, ...], offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fish_offers(script_of("fish", capsys), words) == offered


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "offered"), OFFERED)
def test_fish_completes(
    words: tuple[str, ...], offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"{script_of('fish', capsys)}\ncomplete -C 'naiad {' '.join(words)}'"
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=True)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == offered


@pytest.mark.parametrize("words", ["key a", "serve --print-config", "completion bash"])
def test_output_that_can_not_be_written_is_told_in_a_line(words: str) -> None:
    command = [sys.executable, "-m", "naiad.cli.main", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "naiad: error: the output can not be written: No space left on device\n"
    assert done.returncode == 1
    assert done.stderr.endswith(told)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["argparse", "psutil"], ids=["of all commands", "of the command"])
def test_ctrl_c_while_modules_are_imported_ends_quietly(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("print('interrupted', flush=True)\nraise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "naiad.cli.main", "serve", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 130)
