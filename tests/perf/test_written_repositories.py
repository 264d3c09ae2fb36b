"""The repositories that measurements write have the models that they ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.server import fallback
from perf.server.soak import faults

from helpers.tiny_repository import tiny_checkpoint
from naiad.cli.repository.model_entries import read_repository
from naiad.cli.repository.served_models import ServedModel, served_models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def models(repository: Path) -> dict[str, ServedModel]:
    return {each.name: each for each in served_models(read_repository(repository))}


@pytest.mark.parametrize("fault", [None, *faults.FAULTS])
def test_a_soak_asks_one_model_that_may_have_a_fault(
    tmp_path: Path, checkpoint: Path, fault: str | None
) -> None:
    environment = faults.write_repository(tmp_path / "written", ["--model", str(checkpoint)], fault)
    assert list(models(tmp_path / "written")) == [faults.NAME]
    model_py = (tmp_path / "written" / "llm" / "1" / "model.py").read_text(encoding="utf-8")
    assert (f"faulty_llm_model({fault!r})" in model_py) == bool(environment) == (fault is not None)


def test_a_fallback_is_quantized(tmp_path: Path, checkpoint: Path) -> None:
    fallback.write_repository(tmp_path / "written", checkpoint, ("--max-num-seqs", "4"))
    written = models(tmp_path / "written")
    quantizations = {name: model.engine_config().quantization for name, model in written.items()}
    assert quantizations == {fallback.FIRST: "none", fallback.SECOND: "int8"}
