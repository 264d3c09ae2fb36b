"""A model repository whose `llm` model uses `fast_engine`."""

from __future__ import annotations

import shutil
from pathlib import Path

from perf.common.report import ROOT

_MODEL = """from perf.server.fast_llm_model import fast_llm_model

TritonPythonModel = fast_llm_model({tokens_per_s}, coalesces={coalesces})
"""


def write_fast_repository(path: Path, tokens_per_s: float, *, coalesces: bool = True) -> dict[str, str]:
    """Write the repository; the arguments are those of `fast_llm_model`.

    Returns:
        Variables for the server's environment.
    """
    shutil.copytree(ROOT / "model_repository", path)
    text = _MODEL.format(tokens_per_s=tokens_per_s, coalesces=coalesces)
    (path / "llm" / "1" / "model.py").write_text(text)
    return {"PYTHONPATH": str(ROOT)}
