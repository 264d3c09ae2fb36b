"""`naiad serve`: checks the options and the machine, then starts and supervises a server."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.cli.argument_types import at_least, port_number, port_or_off
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.console import say
from naiad.cli.engine_options import MODEL_HELP, add_engine_arguments, chosen_parameters
from naiad.cli.repository.check import check_repository, core_warnings, with_directories
from naiad.cli.repository.model_entries import (
    ModelEntry,
    find_repository,
    read_repository,
    with_parameters,
    write_repository,
)
from naiad.cli.repository.served_models import top_models
from naiad.cli.serve.openai_process import OpenAIPlan
from naiad.cli.serve.ports import KeptPorts
from naiad.cli.serve.server_files import (
    ServerFiles,
    bundled_server,
    installed_server,
    package_directory,
    server_environment,
)
from naiad.cli.serve.stop_signal import StopSignal
from naiad.cli.system_checks import (
    MIN_TEMP_BYTES,
    available_memory_bytes,
    check_machine,
    check_space,
    running_python,
)
from naiad.config.model_location import model_directory
from naiad.errors import ConfigError
from naiad.openai_server.access.key_file import read_key_file
from naiad.openai_server.access.policy import is_loopback
from naiad.openai_server.api.parsing.families import CALL_CHOICES, REASONING_CHOICES

_OPENAI_PORT = 9000
# The value of --openai-port if it was not given.
_ASKED_FOR_NONE = -1
_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
_EXPOSED = (
    "warning: {host} is not a loopback address. Anyone who can reach these ports can use the server; "
    "there is no authentication."
)
_EXPOSED_BESIDE_KEYS = " The keys of --api-keys do not protect them."
_EXPOSED_EXPLICIT = " With --model-control-mode explicit they can also run their own code on this machine."
_EXPOSED_BUNDLED = (
    " This server is release 24.10, which has published security holes: for anything "
    "exposed use NVIDIA's current container (docs/container.md)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    _add_server_arguments(parser)
    add_engine_arguments(parser, "Each overrides the parameter of the same name in config.pbtxt.")


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then start the server and keep it running.

    Raises:
        StartupError: it cannot be started; the message names the cause and the remedy.
    """
    with StopSignal() as stop, KeptPorts() as kept:
        return _serve(args, stop, kept)


def _serve(args: argparse.Namespace, stop: StopSignal, kept: KeptPorts) -> int:
    library_dir = check_machine()
    check_space(
        Path(tempfile.gettempdir()),
        MIN_TEMP_BYTES,
        "the server",
        "make room, or set TMPDIR to another directory",
    )
    source = find_repository(args.model_repository)
    _check_keys(args)
    ports = kept.keep_each(args.host, {name: getattr(args, f"{name}_port") for name in _PORTS})
    openai_port = _choose_openai_port(args, kept)
    models = _configured(args, read_repository(source))
    needs = check_repository(models, available_memory_bytes())
    entry_point = needs[0].model.entry_point
    for warning in core_warnings([need.model for need in needs]):
        say(warning)
    with tempfile.TemporaryDirectory(prefix="naiad-serve-", ignore_cleanup_errors=True) as folder:
        runtime_dir = Path(folder)
        repository = source
        if not _is_explicit(args):
            repository = runtime_dir / "repository"
            write_repository(source, models, repository)
        files = _server_files(args.tritonserver, runtime_dir)
        _warn_if_exposed(args, files)
        # Imported after the checks because gRPC takes a while to import.
        from naiad.cli.serve.supervisor import SERVER_EXIT_TIMEOUT_S, ServerPlan, Supervisor

        metrics_address = _address(args.host, ports["metrics"])
        plan = ServerPlan(
            command=lambda: [
                *server_command(files, repository, ports, args),
                f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
            ],
            environment=server_environment(os.environ, library_dir),
            runtime_dir=runtime_dir,
            models=None if _is_explicit(args) else models,
            http_address=_address(args.host, ports["http"]),
            grpc_address=_address(args.host, ports["grpc"]),
            metrics_address=metrics_address,
            exit_timeout_s=args.exit_timeout_s,
            is_verbose=args.log_verbose > 0,
            openai=None if openai_port is None else _openai_plan(args, openai_port, metrics_address),
        )
        openai_address = None if openai_port is None else _address(args.openai_host, openai_port)
        say("starting the server")
        return Supervisor(plan, stop, lambda: _announce(args.host, ports, openai_address, entry_point)).run()


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME",
        help=f"{MODEL_HELP} (default: what the repository's model_dir says)",
    )
    add(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="the model repository, which is not changed (default: the one in Naiad's package)",
    )
    add(
        "--model-control-mode",
        choices=("none", "explicit"),
        default="none",
        help="explicit: clients may load and unload models, and the repository is served itself, "
        "not a copy (default: %(default)s)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, port in _PORTS.items():
        add(
            f"--{name}-port",
            type=port_number,
            default=port,
            metavar="N",
            help="default: %(default)s; 0: any free port",
        )
    add(
        "--openai-port",
        type=port_or_off,
        default=_ASKED_FOR_NONE,
        metavar="N",
        help=f"port of the OpenAI API (default: {_OPENAI_PORT}, or a free one if that is taken); 0: any free "
        "port; off: no OpenAI API",
    )
    add(
        "--openai-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the OpenAI API (default: %(default)s)",
    )
    add(
        "--openai-allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name under which clients reach the OpenAI API, besides addresses and localhost; may be "
        "repeated",
    )
    add(
        "--openai-allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin, such as https://chat.example.com, whose pages may call the OpenAI API; may be "
        "repeated",
    )
    add(
        "--openai-lenient",
        action="store_true",
        help="the OpenAI API passes over unknown fields of requests instead of refusing them",
    )
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="the keys of the OpenAI API, one of which a request then needs; read again on SIGHUP, which "
        "then does not stop the server (`naiad key` makes a key)",
    )
    add("--metrics-open", action="store_true", help="the OpenAI API's /metrics needs no key")
    add(
        "--expose-triton",
        action="store_true",
        help="with --api-keys: allow a --host that others can reach, although keys do not protect its ports",
    )
    add(
        "--openai-reasoning",
        choices=REASONING_CHOICES,
        default="auto",
        help="how models write what they reason before they answer; auto: as the checkpoint's chat template "
        "or tokens say (default: %(default)s)",
    )
    add(
        "--openai-tool-parser",
        choices=CALL_CHOICES,
        default="auto",
        help="how models write calls of tools; auto: as the checkpoint's chat template says; none: tools are "
        "refused (default: %(default)s)",
    )
    add(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="a server that is already installed, as in NVIDIA's container "
        "(default: the one of the package nvidia-pytriton)",
    )
    add(
        "--exit-timeout-s",
        type=at_least(0),
        default=30,
        metavar="N",
        help="seconds that running requests get to finish on Ctrl-C or SIGTERM (default: %(default)s)",
    )
    add("--log-verbose", type=at_least(0), default=0, metavar="N", help="the server's log level (default: 0)")


def server_command(
    files: ServerFiles, repository: Path, ports: Mapping[str, int], args: argparse.Namespace
) -> list[str]:
    """Return the command line of tritonserver."""
    command = [str(files.program), f"--model-repository={repository}"]
    if files.backend_directory is not None:
        command.append(f"--backend-directory={files.backend_directory}")
    for name in _PORTS:
        command += [f"--{name}-address={args.host}", f"--{name}-port={ports[name]}"]
    command += [
        "--exit-on-error=true",
        # Every config.pbtxt is complete; auto-completion would start each stub twice.
        "--disable-auto-complete-config",
        f"--log-info={'true' if args.log_verbose else 'false'}",
        f"--log-verbose={args.log_verbose}",
    ]
    if _is_explicit(args):
        names = top_models(read_repository(repository))
        command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    return command


def _choose_openai_port(args: argparse.Namespace, kept: KeptPorts) -> int | None:
    """Return the port of the OpenAI API; None: there is none."""
    port: int | None = args.openai_port
    if port == _ASKED_FOR_NONE:
        return kept.keep_preferred("--openai-port", args.openai_host, _OPENAI_PORT)
    return None if port is None else kept.keep("--openai-port", args.openai_host, port)


def _check_keys(args: argparse.Namespace) -> None:
    if args.api_keys is None:
        if args.openai_port is not None and not is_loopback(args.openai_host):
            raise ConfigError("--openai-host", args.openai_host, "a loopback address, or --api-keys FILE")
        return
    if args.openai_port is None:
        raise ConfigError("--api-keys", str(args.api_keys), "none with --openai-port off")
    read_key_file(args.api_keys)
    if not (is_loopback(args.host) or args.expose_triton):
        raise ConfigError(
            "--host",
            args.host,
            "a loopback address with --api-keys, as keys do not protect Triton's ports, or --expose-triton",
        )


def _openai_plan(args: argparse.Namespace, port: int, metrics_address: str) -> OpenAIPlan:
    options = [f"--allowed-host={name}" for name in args.openai_allowed_host]
    options += [f"--allowed-origin={origin}" for origin in args.openai_allowed_origin]
    options += [f"--metrics-url=http://{metrics_address}/metrics"]
    options += ["--lenient"] if args.openai_lenient else []
    options += ["--metrics-open"] if args.metrics_open else []
    options.append(f"--reasoning={args.openai_reasoning}")
    options.append(f"--tool-parser={args.openai_tool_parser}")
    has_keys = args.api_keys is not None
    options += [f"--api-keys={args.api_keys.absolute()}"] if has_keys else []
    return OpenAIPlan(host=args.openai_host, port=port, options=tuple(options), has_keys=has_keys)


def _configured(args: argparse.Namespace, models: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Return the models with the values of the options and the directories of their checkpoints."""
    overrides = chosen_parameters(args)
    if args.model is not None:
        num_engines = sum(entry.is_engine for entry in models)
        if num_engines > 1:
            raise ConfigError(
                "--model", args.model, f"none: each of the {num_engines} engines names its model"
            )
        overrides["model_dir"] = args.model
    if not _is_explicit(args):
        return with_directories([with_parameters(entry, overrides) for entry in models], resolve_model)
    if overrides:
        raise ConfigError(
            "--model-control-mode",
            "explicit",
            f"no options for {', '.join(sorted(overrides))}: the repository is served as it is",
        )
    return with_directories(models, lambda name, key: model_directory(name, key).resolve())


def _is_explicit(args: argparse.Namespace) -> bool:
    return bool(args.model_control_mode == "explicit")


def _server_files(program: Path | None, runtime_dir: Path) -> ServerFiles:
    if program is not None:
        return installed_server(program)
    return bundled_server(package_directory(), running_python(), runtime_dir / "backends")


def _warn_if_exposed(args: argparse.Namespace, files: ServerFiles) -> None:
    host = args.host
    if not is_loopback(host):
        say(
            _EXPOSED.format(host=host)
            + (_EXPOSED_BESIDE_KEYS if args.api_keys is not None else "")
            + (_EXPOSED_EXPLICIT if _is_explicit(args) else "")
            + (_EXPOSED_BUNDLED if files.is_bundled else "")
        )


def _announce(host: str, ports: Mapping[str, int], openai: str | None, entry: ModelEntry) -> None:
    addresses = {name: _address(host, port) for name, port in ports.items()}
    shown = addresses if openai is None else {**addresses, "openai": f"http://{openai}/v1"}
    print("ready: " + " ".join(f"{name}={address}" for name, address in shown.items()))
    print("\nAsk it something:")
    model = entry.name
    client = f"{sys.executable} -m naiad_client" + ("" if model == "ensemble" else f" --model {model}")
    if entry.config.max_batch_size:
        # The client sends batched requests, which this model accepts.
        print(f'  {client} "What is the capital of France?" --chat --url {addresses["grpc"]}')
    print(f"  curl -N {addresses['http']}/v2/models/{model}/generate_stream \\")
    print("""    -d '{"text_input": "The capital of France is", "max_tokens": 32, "stream": true}'""")
    if openai is not None:
        print(f"  or open http://{openai}/ in a browser")
    print("\nCtrl-C stops it.", flush=True)


def _address(host: str, port: int) -> str:
    """Return HOST:PORT as a client on this machine can use it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
