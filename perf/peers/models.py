"""The model in the formats of other engines, converted once without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from perf.common.report import ROOT
from perf.peers.environments import BUILD

from naiad.errors import StartupError

_WRITE_GGUF = ROOT / "perf" / "peers" / "adapters" / "write_gguf.py"
_ERROR_TAIL_CHARS = 600


def prepare(model_dir: Path, model_format: str, python: Path) -> Path:
    """Return the model in a format; it is converted if that has not been done.

    Args:
        model_dir: the checkpoint.
        model_format: "checkpoint", "gguf-BF16", "gguf-Q8_0", "openvino-fp16" or "openvino-int8".
        python: the interpreter of the engine's environment, which has the converter.

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
    print(f"converting {model_dir.name} to {model_format}", flush=True)
    if tool == "gguf":
        command = [str(python), str(_WRITE_GGUF), str(model_dir), str(unfinished), kind]
    else:
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model_dir)]
        command += ["--task", "text-generation-with-past", "--weight-format", kind, str(unfinished)]
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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
