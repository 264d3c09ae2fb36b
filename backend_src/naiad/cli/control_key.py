"""The key without which nobody loads or unloads models, because whoever does so runs their own code here."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from naiad.cli.console import say
from naiad.errors import ConfigError, StartupError
from naiad.small_file import read_private_file

HEADER = "naiad-model-control-key"
# Triton puts this before the name of a header that restricts gRPC.
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"
_PROTOCOL = "model-repository"
_OPTION = "--model-control-key"
# What the server's option can hold; long enough that nobody guesses it.
_KEY = re.compile(r"[A-Za-z0-9_.-]{16,256}")
_NUM_BYTES = 32


def control_key(path: Path | None) -> str:
    """Return the key in the file, which is made if there is none; without a file, a new one, which is told.

    Raises:
        StartupError: the file holds no key, others may read it, or it cannot be read or made.
    """
    if path is None:
        key = secrets.token_urlsafe(_NUM_BYTES)
        say(f"the key of model control, which is shown only now: {key} (header {HEADER})")
        return key
    try:
        if not path.exists():
            _make(path)
            say(f"made a key of model control: {path}")
    except OSError as error:
        raise StartupError(f"{_OPTION} {path} can not be made: {error.strerror}") from None
    return read_control_key(path)


def read_control_key(path: Path) -> str:
    """Return the key in the file.

    Raises:
        StartupError: the file holds no key, others may read it, or it cannot be read.
    """
    try:
        raw, mode = read_private_file(path)
        if mode & 0o077:
            raise ConfigError(_OPTION, str(path), f"a file that only its owner may read: `chmod 600 {path}`")
        key = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        key = ""
    except OSError as error:
        raise StartupError(f"{_OPTION} {path} can not be read: {error.strerror}") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(_OPTION, str(path), "a file with 16 to 256 letters, digits, '_', '.' or '-'")
    return key


def restrictions(key: str) -> list[str]:
    """The server's options by which loading, unloading and the list of models need the key."""
    rule = f"{_PROTOCOL}:{HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def grpc_metadata(key: str | None) -> Sequence[tuple[str, str]]:
    """The metadata of calls that need the key."""
    return () if key is None else ((GRPC_HEADER, key),)


def _make(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{secrets.token_urlsafe(_NUM_BYTES)}\n")
