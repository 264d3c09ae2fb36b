"""`naiad doctor`: prints what this machine offers, what Naiad will use, and what is missing."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from naiad.cli.serve.server_files import bundled_server, installed_server, package_directory
from naiad.cli.system_checks import MIN_TEMP_BYTES, check_machine, check_space, running_python
from naiad.config import EngineConfig
from naiad.config.cores import num_compute_threads, usable_cores
from naiad.errors import StartupError

Finding = str | int | float | bool | list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tritonserver", type=Path, metavar="PATH", help="a server that is already installed, as for serve"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 1 if something keeps Naiad from serving."""
    found, advice = find()
    faults = find_faults(args.tritonserver)
    if args.json:
        print(json.dumps({**found, "advice": advice, "faults": faults}, indent=2))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name.replace('_', ' '):{width}}  {_written(value)}")
        for line in advice:
            print(f"slower than it could be: {line}")
        for line in faults:
            print(f"keeps Naiad from serving: {line}")
    return 1 if faults else 0


def find() -> tuple[dict[str, Finding], list[str]]:
    """Return what the machine offers and what Naiad will use, and how it could be faster."""
    # Imported here because torch takes seconds.
    try:
        import torch
    except ImportError as error:
        raise StartupError(f"torch can not be loaded: {error}") from error

    from naiad.cli.doctor.kernels import find_kernels
    from naiad.cli.doctor.processor import INSTRUCTION_SETS, read_bandwidth
    from naiad.model_runner.device import resolve_dtype
    from naiad_kernels.native.build import BuildError, compiler
    from naiad_kernels.native.cache import LibraryCache
    from naiad_kernels.native.variants import cpu_flags, grants_amx

    kernels, advice = find_kernels()
    sets = [name for name in INSTRUCTION_SETS if name in cpu_flags()]
    try:
        command = " ".join(compiler())
    except BuildError:
        command = ""
    has_amx = "amx_tile" in sets and grants_amx()
    if "amx_tile" in sets and not has_amx:
        advice.append(
            "the kernel does not grant AMX tiles: allow arch_prctl in the container's seccomp profile"
        )
    cache = LibraryCache.of_user()
    num_threads = num_compute_threads()
    dtype = resolve_dtype(EngineConfig(model_dir="."), torch.device("cpu"))
    found: dict[str, Finding] = {
        "instruction_sets": sets,
        "amx_granted": has_amx,
        "physical_cores_usable": usable_cores(),
        "threads": num_threads,
        "read_gb_per_s": float(f"{read_bandwidth(num_threads) / 1e9:.3g}"),
        "compiler": command,
        "kernel_cache": str(cache.folder) if cache else "",
        **kernels,
        "dtype": str(dtype).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    return found, advice


def find_faults(server: Path | None) -> list[str]:
    """What keeps Naiad from serving, each with its remedy.

    Args:
        server: an installed tritonserver; None: the bundled one.
    """
    with tempfile.TemporaryDirectory(prefix="naiad-doctor-") as folder:
        checks: tuple[Callable[[], object], ...] = (
            check_machine,
            lambda: check_space(Path(folder), MIN_TEMP_BYTES, "the server", "make room, or set TMPDIR"),
            lambda: (
                installed_server(server)
                if server
                else bundled_server(package_directory(), running_python(), Path(folder) / "backends")
            ),
        )
        return [text for check in checks if (text := _fault(check))]


def _fault(check: Callable[[], object]) -> str:
    try:
        check()
    except StartupError as error:
        return str(error)
    return ""


def _written(value: Finding) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (", ".join(value) if isinstance(value, list) else str(value)) or "none"
