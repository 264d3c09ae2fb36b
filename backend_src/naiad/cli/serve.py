"""`naiad serve`: from options to a running, supervised server."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.cli.fetch_model import resolve_model
from naiad.cli.model_files import check_model_directory
from naiad.cli.repository import ModelEntry, find_repository, read_repository, write_repository
from naiad.cli.serve_options import add_arguments, chosen_parameters
from naiad.cli.server_files import (
    ServerFiles,
    bundled_server,
    installed_server,
    package_directory,
    server_environment,
)
from naiad.cli.stop_signal import StopSignal
from naiad.cli.system_checks import (
    MIN_TEMP_BYTES,
    available_memory_bytes,
    check_machine,
    check_memory,
    check_port,
    check_space,
    free_port,
    running_python,
)
from naiad.config import EngineConfig, ModelConfig
from naiad.config.engine_config import field_names
from naiad.errors import ConfigError

__all__ = ["add_arguments", "run"]

_PORTS = ("http", "grpc", "metrics")
_PROCESSES_BYTES = 1 << 30
_EXPOSED = (
    "warning: {host} is not loopback. Whoever reaches these ports can use the server; it asks nobody "
    "for a password."
)
_EXPOSED_BUNDLED = (
    " This server is release 24.10, which has published security holes: for anything "
    "exposed use NVIDIA's current container (docs/container.md)."
)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, start the server, and keep it serving.

    Raises:
        StartupError: it can not be started; the message names cause and remedy.
    """
    with StopSignal() as stop:
        return _serve(args, stop)


def _serve(args: argparse.Namespace, stop: StopSignal) -> int:
    library_dir = check_machine()
    check_space(
        Path(tempfile.gettempdir()),
        MIN_TEMP_BYTES,
        "the server",
        "make room, or set TMPDIR to another directory",
    )
    source = find_repository(args.model_repository)
    models = read_repository(source)
    ports = _choose_ports(args)
    overrides = _checked_overrides(args, models)
    with tempfile.TemporaryDirectory(prefix="naiad-serve-", ignore_cleanup_errors=True) as folder:
        runtime_dir = Path(folder)
        write_repository(source, models, runtime_dir / "repository", overrides)
        files = _server_files(args.tritonserver, runtime_dir)
        _warn_if_exposed(args.host, files)
        # After the checks: gRPC takes a while to import.
        from naiad.cli.supervisor import SERVER_EXIT_TIMEOUT_S, ServerPlan, Supervisor

        command = server_command(files, runtime_dir / "repository", ports, args)
        plan = ServerPlan(
            command=[*command, f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}"],
            environment=server_environment(os.environ, library_dir),
            runtime_dir=runtime_dir,
            models=models,
            http_address=_address(args.host, ports["http"]),
            grpc_address=_address(args.host, ports["grpc"]),
            metrics_address=_address(args.host, ports["metrics"]),
            exit_timeout_s=args.exit_timeout_s,
            is_verbose=args.log_verbose > 0,
        )
        _say("starting the server")
        return Supervisor(plan, stop, lambda: _announce(args.host, ports)).run()


def server_command(
    files: ServerFiles, repository: Path, ports: Mapping[str, int], args: argparse.Namespace
) -> list[str]:
    """Tritonserver with its arguments."""
    command = [str(files.program), f"--model-repository={repository}"]
    if files.backend_directory is not None:
        command.append(f"--backend-directory={files.backend_directory}")
    for name in _PORTS:
        command += [f"--{name}-address={args.host}", f"--{name}-port={ports[name]}"]
    command += [
        "--exit-on-error=true",
        # Every config.pbtxt is complete; completing them would start each stub twice.
        "--disable-auto-complete-config",
        f"--log-info={'true' if args.log_verbose else 'false'}",
        f"--log-verbose={args.log_verbose}",
    ]
    return command


def _choose_ports(args: argparse.Namespace) -> dict[str, int]:
    ports: dict[str, int] = {}
    for name in _PORTS:
        port = getattr(args, f"{name}_port")
        if port in ports.values():
            raise ConfigError(f"--{name}-port", port, "another port than the others'")
        if port:
            check_port(f"--{name}-port", args.host, port)
            ports[name] = port
    for name in _PORTS:
        while name not in ports:
            port = free_port(args.host)
            if port not in ports.values():
                ports[name] = port
    return ports


def _checked_overrides(args: argparse.Namespace, models: Sequence[ModelEntry]) -> dict[str, str]:
    """What the options override in config.pbtxt; the engine's configuration and model are checked with it."""
    overrides = chosen_parameters(args)
    wanted = {entry.parameters["model_dir"] for entry in models if entry.is_ours}
    if args.model is None and len(wanted) > 1:
        # A repository of several checkpoints names each in its config.pbtxt.
        for name in sorted(wanted):
            check_model_directory(resolve_model(name))
        return overrides
    directory = resolve_model(args.model or wanted.pop() or "default")
    overrides["model_dir"] = str(directory)
    weight_bytes = check_model_directory(directory)
    for entry in models:
        if entry.is_engine:
            known = {key: value for key, value in entry.parameters.items() if key in field_names()}
            config = EngineConfig.from_parameters(known | overrides)
            _check_memory_for(config, weight_bytes)
    return overrides


def _check_memory_for(config: EngineConfig, weight_bytes: int) -> None:
    needed_bytes = _PROCESSES_BYTES
    if config.device == "cpu":
        # At least: float32 weights of a 16-bit checkpoint stay in 16 bits where torch can do it.
        is_stored_wide = ModelConfig.from_directory(config.model_dir).dtype == "float32"
        factor = 0.5 if is_stored_wide and config.dtype not in ("auto", "float32") else 1
        needed_bytes += int(weight_bytes * factor) + config.kv_cache_bytes
    check_memory(available_memory_bytes(), needed_bytes)


def _server_files(program: Path | None, runtime_dir: Path) -> ServerFiles:
    if program is not None:
        return installed_server(program)
    return bundled_server(package_directory(), running_python(), runtime_dir / "backends")


def _warn_if_exposed(host: str, files: ServerFiles) -> None:
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        _say(_EXPOSED.format(host=host) + (_EXPOSED_BUNDLED if files.is_bundled else ""))


def _announce(host: str, ports: Mapping[str, int]) -> None:
    addresses = {name: _address(host, port) for name, port in ports.items()}
    print("ready: " + " ".join(f"{name}={address}" for name, address in addresses.items()))
    print("\nAsk it something:")
    client = f"{sys.executable} -m naiad_client"
    print(f'  {client} "What is the capital of France?" --chat --url {addresses["grpc"]}')
    print(f"  curl -N {addresses['http']}/v2/models/ensemble/generate_stream \\")
    print("""    -d '{"text_input": "The capital of France is", "max_tokens": 32, "stream": true}'""")
    print("\nCtrl-C stops it.", flush=True)


def _address(host: str, port: int) -> str:
    """HOST:PORT that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def _say(message: str) -> None:
    print(f"naiad: {message}", file=sys.stderr, flush=True)
