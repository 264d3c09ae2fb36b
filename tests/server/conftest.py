from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.preset_server import add_excluding, add_padded, running, write_presets
from helpers.server import Server, start_server


@pytest.fixture(scope="session")
def server(default_model_dir: Path) -> Iterator[Server]:
    """The default model in float32, shared by the tests that leave it as they found it."""
    measured = ("--max-num-batched-tokens", "0")
    started = start_server(default_model_dir, "--dtype", "float32", "--max-model-len", "2048", *measured)
    yield started
    assert started.stop() == 0, "\n".join(started.lines[-40:])


@pytest.fixture(scope="session")
def presets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tiny models of every preset in one server; see `helpers.preset_server`."""
    folder = tmp_path_factory.mktemp("presets")
    repository = write_presets(folder)
    add_padded(repository)
    add_excluding(repository)
    with running(repository) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker("server")
