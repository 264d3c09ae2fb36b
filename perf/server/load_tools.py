"""NVIDIA's load generators, fetched once into the user's cache: perf_analyzer and GenAI-Perf."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.checkpoints.complete_directory import exclusive_lock, fill_directory, is_complete
from naiad.cli.serve.server_files import package_directory
from naiad.config.model_location import default_model_dir
from naiad.errors import InternalError, StartupError

# The newest wheel that contains a perf_analyzer for glibc 2.36.
_WHEEL = "tritonclient==2.50.0"
_WHEEL_HASH = "sha256:421fbb69ae6ab8cdb2c35b82134fcef2fe11e7af7718b1fcbc53335ab9bfe889"
_PROGRAM = "tritonclient-2.50.0.data/data/bin/perf_analyzer"
_GENAI_PERF = "genai-perf==0.0.16"
# Library → the prefix of its file name in the server's package, and the Debian package that has it too.
_LIBRARIES = {
    "libb64.so.0d": ("libb64-", "libb64-0d"),
    "libcudart.so.12": ("libcudart-", "libcudart12"),
    "libssl.so.3": ("libssl-", "libssl3"),
    "libcrypto.so.3": ("libcrypto-", "libssl3"),
}
_ERROR_TAIL_CHARS = 600
_RUN_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Tool:
    """A program and the environment it needs."""

    program: Path
    environment: Mapping[str, str]

    def run(self, options: Sequence[str]) -> None:
        """Run the program and wait until it ends.

        Raises:
            InternalError: it failed; the message contains the end of its output.
        """
        done = subprocess.run(
            [str(self.program), *options],
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            said = error_of(done.stdout)
            raise InternalError(f"{self.program.name} ended with {done.returncode}: {said}")


def perf_analyzer() -> Tool:
    """Provide perf_analyzer 2.50.

    Raises:
        StartupError: it can not be downloaded, or a library is missing; the message names the remedy.
    """
    directory = _cached("perf-analyzer-2.50.0", _download_perf_analyzer)
    program = directory / "perf_analyzer"
    libraries = directory.parent / "libraries"
    _link_libraries(libraries)
    paths = [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    tool = Tool(program, os.environ | {"LD_LIBRARY_PATH": ":".join(filter(None, paths))})
    _check_libraries(tool)
    return tool


def genai_perf() -> Tool:
    """Provide GenAI-Perf 0.0.16 in its own virtual environment, with the perf_analyzer above.

    Raises:
        StartupError: it can not be installed, or perf_analyzer is not available.
    """
    analyzer = perf_analyzer()
    # A virtual environment can not be moved, so it is installed in place.
    directory = analyzer.program.parents[1] / "genai-perf-0.0.16"
    program, done = directory / "bin" / "genai-perf", directory / "installed"
    with exclusive_lock(directory, _say):
        if not done.exists():
            _say(f"{_GENAI_PERF} is installed once, into {directory}")
            shutil.rmtree(directory, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(directory)], _GENAI_PERF)
            python = str(directory / "bin" / "python")
            _run([python, "-m", "pip", "--disable-pip-version-check", "install", _GENAI_PERF], _GENAI_PERF)
            done.touch()
    path = f"{analyzer.program.parent}:{analyzer.environment.get('PATH', '')}"
    # The tokenizer is a local directory, so nothing has to be looked up on the hub.
    return Tool(program, {**analyzer.environment, "PATH": path, "HF_HUB_OFFLINE": "1"})


def error_of(output: str) -> str:
    """The error messages in a program's output; perf_analyzer prints pages of help after them."""
    lines = [line for line in output.splitlines() if line.lower().startswith("error")]
    return lines[0] if lines else output.strip()[-_ERROR_TAIL_CHARS:]


def missing_libraries(listing: str) -> list[str]:
    """Names that `ldd` could not find."""
    return [line.split()[0] for line in listing.splitlines() if line.rstrip().endswith("=> not found")]


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    directory = default_model_dir().parents[1] / "load-tools" / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(directory, _say):
        if not is_complete(directory):
            _say(f"{name} is fetched once, to {directory}")
            fill_directory(directory, make)
    return directory


def _download_perf_analyzer(directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{_WHEEL} --hash={_WHEEL_HASH}\n")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--platform", "manylinux1_x86_64", "--only-binary", ":all:", "--require-hashes"]
        _run([*command, "--dest", folder, "-r", str(requirements)], _WHEEL)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (directory / "perf_analyzer").write_bytes(archive.read(_PROGRAM))
    (directory / "perf_analyzer").chmod(0o755)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise StartupError(
            f"{what} can not be installed: check the network and pip's index. It said: "
            f"{done.stdout.strip()[-_ERROR_TAIL_CHARS:]}"
        )


def _link_libraries(folder: Path) -> None:
    """Create links to libraries of the server's package, with the names that the loader looks for."""
    package = package_directory()
    packed = package.parent / "nvidia_pytriton.libs" if package is not None else None
    folder.mkdir(exist_ok=True)
    for name, (prefix, _) in _LIBRARIES.items():
        (folder / name).unlink(missing_ok=True)
        for file in packed.glob(f"{prefix}*") if packed is not None else ():
            (folder / name).symlink_to(file)
            break


def _check_libraries(tool: Tool) -> None:
    listing = subprocess.run(
        ["ldd", str(tool.program)], env=dict(tool.environment), capture_output=True, text=True, check=False
    )
    missing = missing_libraries(listing.stdout)
    if missing:
        packages = sorted({_LIBRARIES[name][1] for name in missing if name in _LIBRARIES})
        remedy = f"run `apt-get install {' '.join(packages)}`" if packages else "install what has them"
        raise StartupError(f"perf_analyzer needs {', '.join(missing)}: {remedy}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
