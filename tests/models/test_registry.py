"""Loading of models: what holds while a checkpoint is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.models import load_model, registry
from naiad_kernels.linear import LoadOptions


def test_large_pieces_of_memory_are_returned_while_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def recorded() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    class Checkpoint(registry.Checkpoint):
        def take_matrix(self, name: str, *arguments: Any) -> torch.Tensor:
            events.append(name)
            return super().take_matrix(name, *arguments)

    monkeypatch.setattr(registry, "large_pieces_returned", recorded)
    monkeypatch.setattr(registry, "Checkpoint", Checkpoint)
    make_tiny_model(tmp_path)
    load_model(str(tmp_path), ModelConfig.from_directory(tmp_path), LoadOptions(torch.float32))
    assert events[0] == "begin"
    assert events[-1] == "end"
    assert len(events) > 2
