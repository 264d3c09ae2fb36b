"""Quantises with llm-compressor, which looks at what a model computes for a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from naiad import parent_watch
from naiad.cli.quantize.checkpoint_copy import copy_other_files
from naiad.cli.quantize.scheme import HEAD, Scheme
from naiad.errors import StartupError

_PROGRAM = Path(__file__).with_name("one_shot.py")
_JOB = "naiad-job.json"


def copy_calibrated(
    python: Path, method: str, scheme: Scheme, source: Path, target: Path, texts: Sequence[list[int]]
) -> None:
    """Fill a directory with the checkpoint that llm-compressor makes.

    Args:
        python: the interpreter of an environment with llm-compressor.
        method: "gptq" or "awq".
        scheme: how linear layers are quantised; the head and embeddings are copied.
        source: a checkpoint whose weights are not quantised.
        target: an empty directory.
        texts: token ids on which the method is calibrated.

    Raises:
        StartupError: llm-compressor failed; it has said on stderr how.
    """
    job = {
        "source": str(source),
        "target": str(target),
        "method": method,
        "group": scheme.group,
        "ignore": [HEAD],
        "texts": texts,
    }
    path = target / _JOB
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [str(python), str(_PROGRAM), str(path), str(parent_watch.__file__), str(os.getpid())]
    variables = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # It writes its progress to both; the stdout of this command is for the report alone.
    done = subprocess.run(command, stdout=sys.stderr, env=variables, check=False)
    path.unlink()
    if done.returncode:
        raise StartupError(
            f"llm-compressor could not quantise {source} (exit code {done.returncode}, see above): "
            "--method rtn needs no calibration"
        )
    copy_other_files(source, target)
