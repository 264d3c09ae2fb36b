"""`naiad`: the commands and their dispatch. Imports no torch."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from naiad import __version__
from naiad.cli.arguments import OneLineParser
from naiad.cli.completion import SHELLS, completion
from naiad.cli.console import say_error, use_log_format
from naiad.errors import NaiadError, StartupError

# What a machine may have too little of for any command.
_SCARCE = {
    errno.EMFILE: "too few file descriptors are allowed: raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has no file descriptors left",
    errno.ENOMEM: "there is too little memory, or too little is allowed (ulimit -v)",
}
# Errors of writes: the disk, or whatever standard output is, takes nothing more.
_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}
# Each command's module has `add_arguments(parser)` and `run(args) -> exit code`.
_COMMANDS = {
    "serve": ("naiad.cli.serve.command", "start a tritonserver and supervise it"),
    "openai": ("naiad.cli.openai", "serve the OpenAI API in front of a Triton server that runs elsewhere"),
    "repository": ("naiad.cli.repository.command", "make and check a model repository"),
    "fetch-model": ("naiad.cli.checkpoints.fetch", "download and convert the default model"),
    "quantize": ("naiad.cli.quantize.command", "write a quantised copy of a checkpoint and measure it"),
    "key": ("naiad.cli.key", "make a key for the OpenAI API"),
    "doctor": ("naiad.cli.doctor.command", "print what this machine offers and what Naiad will use"),
    "plan": ("naiad.cli.plan.command", "predict replicas, latency and cost of a load"),
    "completion": ("", "print a completion script for a shell"),
    "report": ("naiad.cli.report", "print what each tenant has used and what it costs"),
    "replay": ("naiad.cli.replay.command", "play recorded requests again and compare what they give"),
    "bench": ("naiad.cli.bench.command", "measure the engine"),
}


def dispatch(words: list[str]) -> int:
    """Run a command and return its exit code; an error becomes one line on stderr."""
    use_log_format(None)
    try:
        code = _run(words)
    except NaiadError as error:
        say_error(error)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except MemoryError:
        say_error(StartupError(_SCARCE[errno.ENOMEM]))
        code = 1
    except OSError as error:
        if error.errno in _SCARCE:
            say_error(StartupError(_SCARCE[error.errno]))
            code = 1
        elif error.errno not in _WRITES or error.filename is not None:
            raise
        else:
            return _say_lost(error)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _say_lost(error)
    return code


def _run(words: list[str]) -> int:
    args = _parser(words).parse_args(_expanded(words))
    if args.command == "completion":
        print(completion(args.shell, _parser(list(_COMMANDS))), end="")
        return 0
    return int(importlib.import_module(_COMMANDS[args.command][0]).run(args))


def _say_lost(error: OSError) -> int:
    """Say that the output can not be written, unless its reader has gone; return the exit code."""
    # Python would try again at exit, and report it.
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        say_error(StartupError(f"the output can not be written: {error.strerror}"))
    return 1


def _expanded(words: list[str]) -> list[str]:
    """Put the options of `naiad serve --config FILE` behind `serve`."""
    if words[:1] != ["serve"]:
        return words
    from naiad.cli.serve import command, config_file

    options = OneLineParser(prog="naiad serve")
    command.add_arguments(options)
    return ["serve", *config_file.with_config(words[1:], options)]


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = OneLineParser(prog="naiad", description="LLM serving inside NVIDIA Triton Inference Server.")
    parser.add_argument("--version", action="version", version=f"naiad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        # Only the requested command is imported: some modules are slow to import.
        if name == "completion":
            command.add_argument("shell", choices=SHELLS, help="the shell")
        elif name in words:
            importlib.import_module(module).add_arguments(command)
    return parser
