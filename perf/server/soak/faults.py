"""A model repository whose `llm` model may have a fault, by which a soak shows that it would see one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.common.report import ROOT

from naiad.cli.main import main as naiad

NAME = "soaked"
LEAK, LOST_END, WRONG_TOKEN = "leak", "lost-end", "wrong-token"
FAULTS = (LEAK, LOST_END, WRONG_TOKEN)
_MODEL = """from perf.server.soak.faulty_model import faulty_llm_model

TritonPythonModel = faulty_llm_model({fault!r})
"""


def write_repository(path: Path, options: Sequence[str], fault: str | None) -> dict[str, str]:
    """Write a repository of one model, which may have one of `FAULTS`.

    Args:
        path: the new directory.
        options: of `naiad repository create`.
        fault: one of `FAULTS`; None: it has none.

    Returns:
        Variables for the server's environment.
    """
    naiad(["repository", "create", "--name", NAME, *options, str(path)])
    if fault is None:
        return {}
    (path / "llm" / "1" / "model.py").write_text(_MODEL.format(fault=fault))
    return {"PYTHONPATH": str(ROOT)}
