"""`naiad repository`: creates a model repository, adds and removes models, and checks them."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path

from naiad.cli.argument_types import some_text
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.checkpoints.model_files import check_checkpoint, check_model_directory
from naiad.cli.console import say
from naiad.cli.engine_options import MODEL_HELP, add_engine_arguments, chosen_parameters
from naiad.cli.plain_paths import PLAIN_CHARACTERS, is_plain, shown
from naiad.cli.repository.check import check_repository, warnings_of, with_directories
from naiad.cli.repository.model_entries import find_repository, read_repository
from naiad.cli.repository.presets import ALWAYS_DECOUPLED, PRESETS
from naiad.cli.repository.served_models import ServedModel, check_name, served_models
from naiad.cli.repository.template import NewModel, add_model
from naiad.config import EngineConfig
from naiad.config.memory import available_memory_bytes
from naiad.config.model_location import path_of_text, text_of_path
from naiad.errors import ConfigError, StartupError

_DEST = "DEST"
_MAX_BATCH_SIZE = 1024
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands and their options."""
    commands = parser.add_subparsers(
        dest="action", required=True, metavar="create | add | remove | list | check"
    )
    for action, summary in (
        ("create", "write a new repository that serves one model"),
        ("add", "serve a further model from a repository; its models' names begin with NAME_"),
    ):
        command = commands.add_parser(action, help=summary, description=summary.capitalize() + ".")
        _add_model_arguments(command)
        command.set_defaults(act=_create if action == "create" else _add)
    remove = commands.add_parser("remove", help="remove a model from a repository")
    remove.add_argument("--name", required=True, metavar="NAME", help="as `naiad repository list` shows it")
    remove.set_defaults(act=_remove)
    listed = commands.add_parser("list", help="list the models of a repository")
    listed.set_defaults(act=_list)
    check = commands.add_parser("check", help="check that this machine can serve the repository")
    check.set_defaults(act=_check)
    for command in commands.choices.values():
        command.add_argument("repository", type=Path, metavar=_DEST, help="the repository's directory")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; returns 0.

    Raises:
        StartupError: it cannot be done; nothing was changed.
    """
    args.act(args)
    return 0


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=some_text, required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--name",
        required=True,
        metavar="NAME",
        help="what to call it; also its name for clients of the OpenAI API",
    )
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="naiad",
        help="names and shapes of the models: Naiad's own, those of TensorRT-LLM's backend, or the vLLM "
        "backend's (default: naiad)",
    )
    parser.add_argument(
        "--no-decoupled",
        dest="decoupled",
        action="store_false",
        help="one response per request, for clients that use HTTP infer or unary gRPC; no streaming",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="N", help="maximum number of rows of a request (default: 8)"
    )
    add_engine_arguments(
        parser, "Each becomes the parameter of the same name in config.pbtxt.", has_served_name=False
    )


def _create(args: argparse.Namespace) -> None:
    model = _new_model(args, prefix="")
    repository: Path = args.repository.absolute()
    if repository.exists() and (not repository.is_dir() or any(repository.iterdir())):
        raise StartupError(f"{repository} exists and is not empty: choose another, or use `add`")
    new = [each for each in (repository, *repository.parents) if not each.exists()]
    try:
        repository.mkdir(parents=True, exist_ok=True)
        names = add_model(model, repository)
    except BaseException as error:
        for directory in new:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if isinstance(error, OSError):
            raise StartupError(f"{repository} can not be made: {error.strerror}") from error
        raise
    _print_added(names, repository)


def _add(args: argparse.Namespace) -> None:
    repository = find_repository(args.repository, _DEST)
    models = served_models(read_repository(repository))
    if args.name in (model.name for model in models):
        raise ConfigError("--name", args.name, f"another name than {', '.join(m.name for m in models)}")
    _print_added(add_model(_new_model(args, prefix=f"{args.name}_"), repository), repository)


def _remove(args: argparse.Namespace) -> None:
    repository = find_repository(args.repository, _DEST)
    models = served_models(read_repository(repository))
    names = ", ".join(model.name for model in models)
    chosen = next((model for model in models if model.name == args.name), None)
    if chosen is None:
        raise ConfigError("--name", args.name, f"one of {names}")
    if len(models) == 1:
        raise StartupError(f"{args.name} is the only model of {repository}: remove the directory itself")
    others = {entry.name for model in models if model is not chosen for entry in model.entries}
    for entry in reversed(chosen.entries):
        if entry.name not in others:
            shutil.rmtree(repository / entry.name)
            print(f"removed {shown(repository / entry.name)}")


def _list(args: argparse.Namespace) -> None:
    for model in served_models(read_repository(find_repository(args.repository, _DEST))):
        _print_names(model)


def _check(args: argparse.Namespace) -> None:
    repository = find_repository(args.repository, _DEST)
    entries = with_directories(read_repository(repository), resolve_model)
    available_bytes = available_memory_bytes()
    needs = check_repository(entries, available_bytes)
    for need in needs:
        _print_model(need.model)
        cache = f"{need.kv_cache_bytes / _GIB:.2f} GiB" if need.kv_cache_bytes else "chosen at start"
        print(f"  weights {need.weight_bytes / _GIB:.2f} GiB, KV cache {cache}")
        print(f"  memory at least {need.memory_bytes / _GIB:.2f} GiB")
    for warning in warnings_of([need.model for need in needs]):
        say(warning, "warning")
    _warn_of_path(repository)
    total_bytes = sum(need.memory_bytes for need in needs)
    print(f"{total_bytes / _GIB:.2f} GiB in all, {available_bytes / _GIB:.2f} GiB are available")


def _print_model(model: ServedModel) -> None:
    config = model.engine_config()
    _print_names(model)
    print(f"  {shown(path_of_text(config.model_dir))} on {config.device}, {config.max_num_seqs} sequences")


def _print_names(model: ServedModel) -> None:
    print(f"{model.name}: {', '.join(sorted(entry.name for entry in model.entries))}")


def _new_model(args: argparse.Namespace, prefix: str) -> NewModel:
    """The model that the options describe, after checking them."""
    if not args.decoupled and args.preset in ALWAYS_DECOUPLED:
        raise ConfigError("--preset", args.preset, "naiad or trtllm with --no-decoupled")
    check_name(args.name)
    if args.max_batch_size is not None and not 1 <= args.max_batch_size <= _MAX_BATCH_SIZE:
        raise ConfigError("--max-batch-size", args.max_batch_size, f"1 … {_MAX_BATCH_SIZE}")
    directory = resolve_model(text_of_path(args.model))
    check_model_directory(directory)
    parameters = {**chosen_parameters(args), "model_dir": text_of_path(directory)}
    if args.draft_model:
        draft_directory = resolve_model(args.draft_model, "--draft-model")
        check_checkpoint(draft_directory)
        parameters["draft_model"] = text_of_path(draft_directory, "draft_model")
    EngineConfig.from_parameters(parameters)
    return NewModel(args.name, prefix, args.max_batch_size, parameters, args.preset, args.decoupled)


def _print_added(names: list[str], repository: Path) -> None:
    for name in names:
        print(f"wrote {shown(repository / name)}")
    _warn_of_path(repository)


def _warn_of_path(repository: Path) -> None:
    if not is_plain(repository):
        say(
            f"tritonserver can not take the path {shown(repository)}, which has other characters than "
            f"{PLAIN_CHARACTERS.removesuffix(' only')}: `naiad serve` serves it, "
            "tritonserver by itself does not",
            "warning",
        )
