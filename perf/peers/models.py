"""The model in the formats of other engines and in quantised ones, converted once without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from perf.common.report import ROOT
from perf.peers.environments import BUILD, install

from naiad.errors import StartupError

_WRITE_GGUF = ROOT / "perf" / "peers" / "adapters" / "write_gguf.py"
_ERROR_TAIL_CHARS = 600


def prepare(model_dir: Path, model_format: str, pip_args: str) -> Path:
    """Return the model in a format; it is converted if that has not been done.

    Args:
        model_dir: the checkpoint.
        model_format: "checkpoint", "gguf-TYPE" with a type of GGUF, "openvino-fp16", "openvino-int8",
            "compressed-4" or "compressed-8".
        pip_args: further options of pip, for an environment that has a converter.

    Raises:
        StartupError: the converter failed.
    """
    if model_format == "checkpoint":
        return model_dir
    tool, kind = model_format.split("-")
    target = BUILD / "models" / model_dir.name / (model_format + (".gguf" if tool == "gguf" else ""))
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"unfinished-{target.name}")
    _remove(unfinished)
    command = _command(tool, kind, model_dir, unfinished, pip_args)
    print(f"converting {model_dir.name} to {model_format}", flush=True)
    done = subprocess.run(
        command,
        env=dict(os.environ) | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StartupError(f"{model_format} can not be written: {done.stdout.strip()[-_ERROR_TAIL_CHARS:]}")
    unfinished.rename(target)
    return target


def _command(tool: str, kind: str, model_dir: Path, out: Path, pip_args: str) -> list[str]:
    if tool == "gguf":
        return [str(install("llama_cpp", pip_args)), str(_WRITE_GGUF), str(model_dir), str(out), kind]
    if tool == "compressed":
        quantize = [sys.executable, "-m", "naiad.cli.main", "quantize", "--bits", kind, "--text-tokens", "0"]
        return [*quantize, str(model_dir), str(out)]
    command = [str(install("openvino", pip_args).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(model_dir), "--task", "text-generation-with-past"]
    return [*command, "--weight-format", kind, str(out)]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
