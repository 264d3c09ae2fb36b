"""Clients of the OpenAI API as they are: each has a program that asserts what the client returns."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.environments import node_folder, node_path, python_of
from clients.served import PROGRAMS, Served
from helpers.server import start_server
from helpers.tool_checkpoint import tool_checkpoint


@pytest.mark.parametrize(
    "name", ["openai", "anthropic", "litellm", "langchain_openai", "pydantic_ai", "openai_agents"]
)
def test_python_client(served: Served, name: str) -> None:
    served.run(python_of(name), PROGRAMS / f"run_{name}.py")


@pytest.fixture(scope="module")
def served_with_tools(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tool_checkpoint(tmp_path_factory.mktemp("models") / "tools", default_model_dir)
    server = start_server(folder, "--openai-port", "0")
    yield Served(server, folder)
    assert server.stop() == 0, "\n".join(server.lines[-40:])


@pytest.mark.parametrize("name", ["openai", "anthropic", "instructor", "pydantic_ai", "openai_agents"])
def test_tools_of_python_client(served_with_tools: Served, name: str) -> None:
    served_with_tools.run(python_of(name), PROGRAMS / f"run_{name}_tools.py")


@pytest.mark.parametrize("name", ["openai_node", "ai_sdk"])
def test_node_client(served: Served, name: str) -> None:
    run_with_node(served, name, f"run_{name}.mjs")


def test_tools_of_node_client(served_with_tools: Served) -> None:
    run_with_node(served_with_tools, "ai_sdk", "run_ai_sdk_tools.mjs")


def run_with_node(served: Served, name: str, program: str) -> None:
    folder = node_folder(name)
    # Node looks for packages beside the program.
    for file in ("naiad_server.mjs", program):
        shutil.copy(PROGRAMS / file, folder)
    served.run(node_path(), folder / program)
