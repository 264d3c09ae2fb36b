"""The environments of other engines: one for each, with pinned packages, in a directory that git ignores."""

from __future__ import annotations

import os
from pathlib import Path

from perf.common import environments
from perf.common.report import ROOT

BUILD = ROOT / "build" / "peers"
LOCKS = ROOT / "perf" / "peers" / "requirements"
# Whether an environment needs torch. llama.cpp is compiled for this machine while it is installed.
ENVIRONMENTS = {"vllm": True, "llama_cpp": False, "openvino": True, "transformers": True}
_MALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


def install(name: str, pip_args: str = "") -> Path:
    """Return the interpreter of an environment, which is made first if its lock has changed.

    Args:
        name: a key of `ENVIRONMENTS`.
        pip_args: further options of pip, such as an index with torch's CPU build.

    Raises:
        StartupError: it can not be installed; the message has pip's own words.
    """
    return environments.install(
        BUILD / name, LOCKS / f"{name}.txt", needs_torch=ENVIRONMENTS[name], pip_args=pip_args
    )


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
