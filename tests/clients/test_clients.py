"""Clients of the OpenAI API as they are: each has a program that asserts what the client returns."""

from __future__ import annotations

import shutil

import pytest

from clients.environments import node_folder, node_path, python_of
from clients.served import PROGRAMS, Served


@pytest.mark.parametrize("name", ["openai", "litellm", "langchain_openai", "pydantic_ai", "openai_agents"])
def test_python_client(served: Served, name: str) -> None:
    served.run(python_of(name), PROGRAMS / f"run_{name}.py")


@pytest.mark.parametrize("name", ["openai_node", "ai_sdk"])
def test_node_client(served: Served, name: str) -> None:
    folder = node_folder(name)
    # Node looks for packages beside the program.
    for program in ("naiad_server.mjs", f"run_{name}.mjs"):
        shutil.copy(PROGRAMS / program, folder)
    served.run(node_path(), folder / f"run_{name}.mjs")
