"""`naiad serve`: checks the options and the machine, then starts and supervises a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.console import say, say_if_possible, use_log_format, write_if_possible
from naiad.cli.control_key import control_key, restrictions
from naiad.cli.engine_options import chosen_parameters
from naiad.cli.repository.check import check_repository, warnings_of, with_directories
from naiad.cli.repository.model_entries import (
    ModelEntry,
    find_repository,
    read_repository,
    with_parameters,
)
from naiad.cli.repository.served_models import SERVED_NAME, ServedModel, served_models, top_models
from naiad.cli.repository.snapshot import RepositorySnapshot
from naiad.cli.serve.config_file import config_text
from naiad.cli.serve.exposure import (
    LOOPBACK,
    gate_plan,
    has_gate,
    host_of_triton,
    keep_server_ports,
    warn_if_exposed,
)
from naiad.cli.serve.needed_options import refuse_without_effect
from naiad.cli.serve.options import ASKED_FOR_NONE, OPENAI_PORT, PORTS, add_arguments
from naiad.cli.serve.ports import KeptPorts
from naiad.cli.serve.runtime_folder import region_prefix, runtime_folder
from naiad.cli.serve.server_files import (
    ServerFiles,
    bundled_server,
    installed_server,
    package_directory,
    server_environment,
)
from naiad.cli.serve.server_paths import plain_repository, use_plain_temporary_directory
from naiad.cli.serve.side_process import SidePlan
from naiad.cli.serve.stop_signal import Stopped, StopSignal
from naiad.cli.system_checks import (
    MIN_TEMP_BYTES,
    check_machine,
    check_space,
    running_python,
)
from naiad.config.memory import available_memory_bytes
from naiad.config.model_location import checkpoint_name, model_directory, path_of_text, text_of_path
from naiad.errors import ConfigError
from naiad.line_file import prepare
from naiad.openai_server.access.key_file import read_key_file
from naiad.openai_server.access.policy import is_loopback
from naiad.openai_server.fallbacks import Fallbacks
from naiad.recording.record_file import RECORD_FILE, RECORD_PROMPTS
from naiad.tracing.exporter import OTLP_ENDPOINT, Collector

__all__ = ["add_arguments", "run"]

_FALLBACK = "--openai-fallback"
# Parameters of the models that name checkpoints, and their options.
_MODEL_OPTIONS = {"model_dir": "--model", "draft_model": "--draft-model"}
_EXPLICIT = (
    "with --model-control-mode explicit whoever has the key of model control can run their own code on this "
    "machine"
)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then start the server and keep it running.

    Raises:
        StartupError: it cannot be started; the message names the cause and the remedy.
    """
    options = argparse.ArgumentParser()
    add_arguments(options)
    if args.print_config:
        print(config_text(args, options))
        return 0
    use_log_format(args.log_format)
    refuse_without_effect(args, options)
    try:
        with StopSignal() as stop, KeptPorts() as kept:
            stop.ends_at_once = True
            if args.api_keys is not None:
                # The server reads the file when it starts.
                stop.on_reload = lambda: None
            return _serve(args, stop, kept)
    except Stopped:
        say_if_possible("stopped before a server was started")
        return 0


def _serve(args: argparse.Namespace, stop: StopSignal, kept: KeptPorts) -> int:
    library_dir = check_machine()
    temporary = use_plain_temporary_directory()
    check_space(temporary, MIN_TEMP_BYTES, "the server", "make room, or set TMPDIR to another directory")
    source = find_repository(args.model_repository)
    _check_keys(args)
    fallbacks = Fallbacks.parse(_FALLBACK, args.openai_fallback)
    if args.otlp_endpoint is not None:
        Collector.parse("--otlp-endpoint", args.otlp_endpoint)
    if args.record is not None:
        prepare("--record", args.record)
    if args.usage_file is not None:
        prepare("--usage-file", args.usage_file)
    is_gated = has_gate(args, is_bundled=args.tritonserver is None)
    host = args.host if is_gated else host_of_triton(args.host)
    ports = kept.keep_each(host, {name: getattr(args, f"{name}_port") for name in PORTS})
    server_host, server_ports = (LOOPBACK, keep_server_ports(kept)) if is_gated else (host, ports)
    openai_port = _choose_openai_port(args, kept)
    models = _configured(args, read_repository(source))
    _check_fallbacks(fallbacks, models, may_others_come=_is_explicit(args))
    first = _checked_models(models)
    with runtime_folder() as runtime_dir:
        place = runtime_dir / "repository"
        snapshot = None if _is_explicit(args) else RepositorySnapshot(source, models, place)
        repository = plain_repository(source, place) if snapshot is None else place
        files = _server_files(args.tritonserver, runtime_dir)
        key = _control_key(args)
        warn_if_exposed(args, is_bundled=files.is_bundled, is_gated=is_gated)
        # Imported after the checks because gRPC takes a while to import.
        from naiad.cli.serve.supervisor import SERVER_EXIT_TIMEOUT_S, ServerPlan, Supervisor

        metrics_address = _address(server_host, server_ports["metrics"])
        beside = [gate_plan(args, ports, server_ports)] if is_gated else []
        if openai_port is not None:
            beside.append(_openai_plan(args, openai_port, metrics_address, runtime_dir))
        plan = ServerPlan(
            command=lambda: [
                *server_command(files, _checked(repository, snapshot), server_host, server_ports, args),
                *([] if key is None else restrictions(key)),
                f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
                f"--backend-config=python,shm-region-prefix-name={region_prefix(runtime_dir)}",
            ],
            environment=server_environment(os.environ, library_dir),
            runtime_dir=runtime_dir,
            models=None if _is_explicit(args) else models,
            http_address=_address(server_host, server_ports["http"]),
            grpc_address=_address(server_host, server_ports["grpc"]),
            metrics_address=metrics_address,
            start_timeout_s=args.start_timeout_s,
            exit_timeout_s=args.exit_timeout_s,
            shutdown_delay_s=args.shutdown_delay_s,
            is_verbose=args.log_verbose > 0,
            log_format=args.log_format,
            control_key=key,
            beside=beside,
        )
        openai_address = None if openai_port is None else _address(args.openai_host, openai_port)
        say("starting the server")
        stop.ends_at_once = False
        return Supervisor(plan, stop, lambda: _announce(args.host, ports, openai_address, first)).run()


def _checked_models(models: Sequence[ModelEntry]) -> ServedModel:
    """Check that this machine can serve the models, say what is doubtful, and return the first one."""
    served = [need.model for need in check_repository(models, available_memory_bytes())]
    for warning in warnings_of(served):
        say(warning, "warning")
    return served[0]


def _check_fallbacks(fallbacks: Fallbacks, entries: Sequence[ModelEntry], *, may_others_come: bool) -> None:
    """Check that the models of fallbacks are served.

    Args:
        fallbacks: of the option.
        entries: the models of the repository.
        may_others_come: clients may load other models later; then names of others are a warning.

    Raises:
        ConfigError: they are not, and never will be.
    """
    models = served_models(entries)
    # Of two models with the same name the second is called by that of its engine.
    shared = Counter(_shown_name(model) for model in models)
    names = [*shared, *(model.engine.name for model in models if shared[_shown_name(model)] > 1)]
    if not may_others_come:
        fallbacks.refuse_unknown(_FALLBACK, names)
    for pair, problem in fallbacks.unknown(names):
        say(f"{_FALLBACK} {pair}: {problem}, until a client loads it", "warning")


def server_command(
    files: ServerFiles, repository: Path, host: str, ports: Mapping[str, int], args: argparse.Namespace
) -> list[str]:
    """Return the command line of tritonserver, which listens on these ports of the host."""
    command = [str(files.program), f"--model-repository={repository}"]
    if files.backend_directory is not None:
        command.append(f"--backend-directory={files.backend_directory}")
    for name in PORTS:
        command += [f"--{name}-address={host}", f"--{name}-port={ports[name]}"]
    command += [
        "--exit-on-error=true",
        # Every config.pbtxt is complete; auto-completion would start each stub twice.
        "--disable-auto-complete-config",
        f"--log-info={'true' if args.log_verbose else 'false'}",
        f"--log-verbose={args.log_verbose}",
    ]
    if args.otlp_endpoint is not None:
        url = Collector.parse("--otlp-endpoint", args.otlp_endpoint).url
        # Rate 0: only requests that say which trace they belong to; Naiad traces the others itself.
        command += [
            f"--trace-config={each}"
            for each in (
                "mode=opentelemetry",
                "level=TIMESTAMPS",
                "rate=0",
                f"opentelemetry,url={url}",
                "opentelemetry,resource=service.name=naiad-triton",
            )
        ]
    if _is_explicit(args):
        names = top_models(read_repository(repository))
        command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    return command


def _checked(repository: Path, snapshot: RepositorySnapshot | None) -> Path:
    """Return the repository for a start, after saying what of it has changed."""
    for change in snapshot.changes() if snapshot is not None else ():
        say_if_possible(change, "warning")
    return repository


def _choose_openai_port(args: argparse.Namespace, kept: KeptPorts) -> int | None:
    """Return the port of the OpenAI API; None: there is none."""
    port: int | None = args.openai_port
    if port == ASKED_FOR_NONE:
        return kept.keep_preferred("--openai-port", args.openai_host, OPENAI_PORT)
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


def _openai_plan(args: argparse.Namespace, port: int, metrics_address: str, runtime_dir: Path) -> SidePlan:
    options = [f"--server-pid={os.getpid()}", f"--host={args.openai_host}", f"--port={port}"]
    options += [f"--allowed-host={name}" for name in args.openai_allowed_host]
    options += [f"--allowed-origin={origin}" for origin in args.openai_allowed_origin]
    options += [f"--metrics-url=http://{metrics_address}/metrics"]
    options += ["--lenient"] if args.openai_lenient else []
    options += [f"--fallback={pair}" for pair in args.openai_fallback]
    options += ["--metrics-open"] if args.metrics_open else []
    options += [f"--record={args.record.absolute()}"] if args.record is not None else []
    options += ["--record-prompts"] if args.record_prompts else []
    options += [f"--otlp-endpoint={args.otlp_endpoint}"] if args.otlp_endpoint is not None else []
    options.append(f"--reasoning={args.openai_reasoning}")
    options.append(f"--tool-parser={args.openai_tool_parser}")
    options.append(f"--header-timeout-s={args.openai_header_timeout_s}")
    options.append(f"--slow-reader-s={args.slow_reader_s}")
    options.append(f"--log-format={args.log_format}")
    has_keys = args.api_keys is not None
    if has_keys:
        options += [f"--api-keys={args.api_keys.absolute()}"]
        options += [f"--last-good-keys={runtime_dir / 'keys.json'}"]
    return SidePlan(
        name="the OpenAI server",
        module="naiad.openai_server",
        host=args.openai_host,
        port=port,
        options=tuple(options),
        has_keys=has_keys,
        has_models=True,
    )


def _configured(args: argparse.Namespace, models: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Return the models with the values of the options and the directories of their checkpoints."""
    overrides = chosen_parameters(args)
    for option, value, key in _telemetry(args):
        if not all(key in entry.parameters for entry in models if entry.is_engine):
            expected = f"a model repository whose engines have the parameter {key}: make it again"
            raise ConfigError(option, value, expected)
        overrides[key] = value
    if args.model is not None:
        num_engines = sum(entry.is_engine for entry in models)
        if num_engines > 1:
            raise ConfigError(
                "--model", args.model, f"none: each of the {num_engines} engines names its model"
            )
        overrides["model_dir"] = text_of_path(args.model)
    if not _is_explicit(args):
        options = {key: each for key, each in _MODEL_OPTIONS.items() if key in overrides}
        return with_directories(
            [with_parameters(entry, overrides) for entry in models],
            lambda name, key: resolve_model(name, options.get(key, key)),
        )
    if overrides:
        names = ", ".join(sorted(overrides))
        where = "the repository is served as it is, so set that in its config.pbtxt files"
        raise ConfigError("--model-control-mode", "explicit", f"no options for {names}: {where}")
    return with_directories(models, lambda name, key: model_directory(name, key).resolve())


def _telemetry(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield option, value and the models' parameter for each option of what is told about requests."""
    if args.otlp_endpoint is not None:
        yield "--otlp-endpoint", args.otlp_endpoint, OTLP_ENDPOINT
    if args.record is not None:
        yield "--record", text_of_path(str(args.record.absolute())), RECORD_FILE
    if args.record_prompts:
        yield "--record-prompts", "true", RECORD_PROMPTS


def _is_explicit(args: argparse.Namespace) -> bool:
    return bool(args.model_control_mode == "explicit")


def _control_key(args: argparse.Namespace) -> str | None:
    """Return the key of model control; None: there is no model control."""
    if not _is_explicit(args):
        return None
    say(_EXPLICIT, "warning")
    return control_key(args.model_control_key)


def _server_files(program: Path | None, runtime_dir: Path) -> ServerFiles:
    if program is not None:
        return installed_server(program)
    return bundled_server(package_directory(), running_python(), runtime_dir / "backends")


def _announce(host: str, ports: Mapping[str, int], openai: str | None, first: ServedModel) -> None:
    addresses = {name: _address(host, ports[name]) for name in PORTS}
    shown = addresses if openai is None else {**addresses, "openai": f"http://{openai}/v1"}
    entry = first.entry_point
    model = entry.name
    client = f"{sys.executable} -m naiad_client" + ("" if model == "ensemble" else f" --model {model}")
    lines = [
        "ready: " + " ".join(f"{name}={address}" for name, address in shown.items()),
        f"\nAsk {_shown_name(first)} something:",
    ]
    if entry.config.max_batch_size:
        # The client sends batched requests, which this model accepts.
        lines.append(f'  {client} "What is the capital of France?" --chat --url {addresses["grpc"]}')
    lines.append(f"  curl -N {addresses['http']}/v2/models/{model}/generate_stream \\")
    lines.append("""    -d '{"text_input": "The capital of France is", "max_tokens": 32, "stream": true}'""")
    if openai is not None:
        lines.append(f"  or open http://{openai}/ in a browser")
    write_if_possible("\n".join([*lines, "\nCtrl-C stops it.\n"]), sys.stdout)


def _shown_name(model: ServedModel) -> str:
    return model.engine.parameters.get(SERVED_NAME) or checkpoint_name(
        path_of_text(model.engine_config().model_dir)
    )


def _address(host: str, port: int) -> str:
    """Return HOST:PORT as a client on this machine can use it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
