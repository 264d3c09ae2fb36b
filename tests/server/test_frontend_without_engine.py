"""Models that use the engine of an `llm` model while that model is not loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.model_control import control_client
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository, tiny_checkpoint

VLLM_INPUTS = {"text_input": np.array([b"Hello"], dtype=np.object_)}
AWAY = "does not serve now"
UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"
# Parameters that a config.pbtxt of the vLLM backend may have.
PARAMETERS = "".join(
    f'parameters {{ key: "{key}" value: {{ string_value: "true" }} }}\n'
    for key in ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK")
)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("key") / "key"


@pytest.fixture(scope="module")
def controlled(
    tmp_path_factory: pytest.TempPathFactory, leaving: Leaving, key_file: Path
) -> Iterator[Server]:
    """A server whose models are loaded and unloaded, including the vLLM backend's model."""
    folder = tmp_path_factory.mktemp("frontend_without_engine")
    checkpoint, repository = tiny_checkpoint(folder / "checkpoint"), folder / "repository"
    create_repository(repository, checkpoint)
    create_repository(folder / "vllm", checkpoint, "--preset", "vllm")
    shutil.copytree(folder / "vllm" / "vllm_model", repository / "vllm_model")
    append(repository / "vllm_model" / "config.pbtxt", PARAMETERS)
    key = ("--model-control-key", str(key_file))
    with running(leaving, repository, "--model-control-mode", "explicit", *key) as server:
        yield server


def error_of(server: Server, model: str, inputs: dict[str, Any]) -> str:
    outcome = ask(server.grpc, model, inputs)
    assert (outcome.num_finals, outcome.call_error) == (1, "")
    return "; ".join(outcome.errors)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_requests_are_refused_until_the_engine_is_back(controlled: Server, key_file: Path) -> None:
    texts = text_inputs("Hello", 4)
    with control_client(controlled.grpc, key_file) as client:
        for name in ("ensemble", "llm"):
            client.unload_model(name)
        # Requests that arrive while the engine ends get the error of a lost engine.
        eventually(lambda: AWAY in error_of(controlled, "text", texts), 30)
        eventually(lambda: error_of(controlled, "vllm_model", VLLM_INPUTS) == UNHEALTHY, 30)
        client.load_model("llm")
    eventually(lambda: error_of(controlled, "text", texts) == "", 30)
    eventually(lambda: error_of(controlled, "vllm_model", VLLM_INPUTS) == "", 30)
