"""`naiad completion`: prints what makes a shell complete the commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
# Also for zsh, where `path` and `words` are variables of its own, and no length begins with a letter.
_BASH = """\
_naiad() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} place=naiad word offered=
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case "$place $word" in {paths}) place="$place $word";; esac
  done
  case "$place $prev" in
{values}
  esac
  case "$place" in
{words}
  esac
  COMPREPLY=($(compgen -W "$offered" -- "$cur"))
}}
complete -o default -F _naiad naiad
"""
# Functions of its own complete as in bash; they need those of `compinit`, which most shells have loaded.
_ZSH_BEGIN = """\
whence compdef >/dev/null || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or an action of one.

    Attributes:
        path: its words, such as "naiad repository create".
        commands: the words that may follow.
        options: its options; each with its values, if they are few, or None if it takes any value.
        flags: options without a value.
        helps: command or option → what it does.
    """

    path: str
    commands: tuple[str, ...]
    options: dict[str, tuple[str, ...] | None]
    flags: tuple[str, ...]
    helps: dict[str, str]


def commands_of(parser: argparse.ArgumentParser, path: str = "naiad") -> Iterator[Command]:
    """Go through a parser and those of its commands."""
    options: dict[str, tuple[str, ...] | None] = {}
    flags: list[str] = []
    helps: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            helps |= {each.dest: each.help or "" for each in action._choices_actions}
        for option in action.option_strings:
            helps[option] = (action.help or "") % {**vars(action), "prog": "naiad"}
            if action.nargs == 0:
                flags.append(option)
            else:
                options[option] = tuple(map(str, action.choices)) if action.choices else None
    yield Command(path, tuple(below), options, tuple(flags), helps)
    for name, each in below.items():
        yield from commands_of(each, f"{path} {name}")


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of `SHELLS`."""
    commands = list(commands_of(parser))
    if shell == "fish":
        return "".join(f"{line}\n" for command in commands for line in _fish_lines(command))
    script = _BASH.format(
        paths="|".join(f"'{command.path}'" for command in commands[1:]),
        values="\n".join(line for command in commands for line in _value_lines(command)),
        words="\n".join(
            f"    '{each.path}') offered='{' '.join([*each.commands, *each.options, *each.flags])}';;"
            for each in commands
        ),
    )
    return script if shell == "bash" else _ZSH_BEGIN + script


def _value_lines(command: Command) -> Iterator[str]:
    for option, values in command.options.items():
        # Without values the shell completes names of files.
        found = f'COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$cur"))' if values else "COMPREPLY=()"
        yield f"    '{command.path} {option}') {found}; return;;"


def _fish_lines(command: Command) -> Iterator[str]:
    _, *words = command.path.split(" ")
    seen = [f"__fish_seen_subcommand_from {word}" for word in words]
    if command.commands:
        seen.append(f"not __fish_seen_subcommand_from {' '.join(command.commands)}")
    start = f"complete -c naiad -n '{'; and '.join(seen) or 'true'}'"
    for name in command.commands:
        yield f"{start} -f -a {name} -d {_quoted(command.helps.get(name, ''))}"
    for option in (*command.options, *command.flags):
        kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
        values = command.options.get(option)
        value = (
            f" -x -a {_quoted(' '.join(values))}" if values else " -r" if option in command.options else ""
        )
        yield f"{start} {kind}{value} -d {_quoted(command.helps[option])}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
