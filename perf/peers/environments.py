"""The environments of other engines: one for each, with pinned packages, in a directory that git ignores."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from perf.common.report import ROOT

from naiad.errors import StartupError

BUILD = ROOT / "build" / "peers"
LOCKS = ROOT / "perf" / "peers" / "requirements"
# Whether an environment needs torch. llama.cpp is compiled for this machine while it is installed.
ENVIRONMENTS = {"vllm": True, "llama_cpp": False, "openvino": True, "transformers": True}
_TORCH = ROOT / "requirements" / "torch.txt"
_PYTHON = (3, 11)
_ERROR_TAIL_CHARS = 600
_MALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def install(name: str, pip_args: str = "") -> Path:
    """Return the interpreter of an environment, which is made first if its lock has changed.

    Args:
        name: a key of `ENVIRONMENTS`.
        pip_args: further options of pip, such as an index with torch's CPU build.

    Raises:
        StartupError: it can not be installed; the message has pip's own words.
    """
    folder = BUILD / name
    python, mark = folder / "bin" / "python", folder / ".installed"
    lock = LOCKS / f"{name}.txt"
    state = hashlib.sha256(lock.read_bytes() + _TORCH.read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text() == state:
        return python
    if sys.version_info[:2] != _PYTHON:
        raise StartupError(
            f"Python is {sys.version.split()[0]}: the locks are for 3.11, make PYTHON=python3.11"
        )
    print(f"{name}: installing into {folder.relative_to(ROOT)}", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)], name)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *pip_args.split()]
    if ENVIRONMENTS[name]:
        _run([*pip, "-r", str(_TORCH)], name)
    _run([*pip, "--no-deps", "--require-hashes", "-r", str(lock)], name)
    mark.write_text(state)
    return python


def variables(name: str, threads: int) -> dict[str, str]:
    """The environment variables of an engine's process.

    vLLM's documentation asks for Intel's OpenMP, and for tcmalloc where the machine has it.
    """
    made = dict(os.environ) | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if name == "vllm":
        libraries = [BUILD / name / "lib" / "libiomp5.so", _MALLOC]
        made["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.is_file())
        made["VLLM_CACHE_ROOT"] = str(BUILD / "cache" / "vllm")
    return made


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise StartupError(f"{name} can not be installed here: {done.stdout.strip()[-_ERROR_TAIL_CHARS:]}")
