from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import Server, start_server


@pytest.fixture(scope="session")
def server(default_model_dir: Path) -> Iterator[Server]:
    """The default model in float32, shared by the tests that leave it as they found it."""
    measured = ("--max-num-batched-tokens", "0")
    running = start_server(default_model_dir, "--dtype", "float32", "--max-model-len", "2048", *measured)
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker("server")
