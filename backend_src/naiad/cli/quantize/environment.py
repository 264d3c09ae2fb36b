"""The environment of llm-compressor, which the methods gptq and awq run in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from naiad.cli.checkpoints.complete_directory import exclusive_lock
from naiad.cli.console import say
from naiad.cli.environments import make_environment
from naiad.errors import ConfigError, StartupError

# Its packages with hashes, and which torch they are used with; `make lock-quantize` writes the lock.
_FOLDER = Path(__file__).with_name("llm_compressor")
_LOCK, _TORCH = _FOLDER / "lock.txt", _FOLDER / "torch.txt"


def default_environment() -> Path:
    """Return the folder where the environment is unless the user names another."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "naiad" / "environments" / "llm-compressor"


def installed(folder: Path, pip_args: str) -> Path:
    """Return the interpreter of the environment; it is installed first if it is not there.

    Args:
        folder: the environment's.
        pip_args: further options of pip, such as an index with torch's CPU build.

    Raises:
        ConfigError: the folder holds something else.
        StartupError: it cannot be installed; the message names the remedy.
    """
    folder = folder.absolute()
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise ConfigError("--environment", str(folder), "a new or empty folder, or a Python environment")
    state = hashlib.sha256(_LOCK.read_bytes() + _TORCH.read_bytes()).hexdigest()
    words = pip_args.split()
    installs = [
        [*words, "-r", str(_TORCH)],
        [*words, "--no-deps", "--require-hashes", "-r", str(_LOCK)],
    ]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder, say):
            return make_environment(folder, installs, state, say)
    except OSError as error:
        raise StartupError(
            f"{folder} cannot be written ({error.strerror}): choose another --environment"
        ) from None
    except StartupError as error:
        raise StartupError(
            "this method needs llm-compressor (--method rtn needs nothing; --pip-args may name an index): "
            f"{error}"
        ) from None
