from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.preset_server import add_excluding, add_padded, write_presets
from helpers.resting import Resting
from helpers.server import Leaving, Server, live_servers, running, start_server
from helpers.tiny_repository import create_repository, tiny_checkpoint

# Room for 130,000 tokens of a tiny model.
ROOMY = "64000000"


@pytest.fixture(scope="session")
def leaving() -> Iterator[Leaving]:
    """Stops the servers whose tests are over."""
    servers = Leaving()
    yield servers
    servers.check()


@pytest.fixture(scope="session")
def shared() -> dict[str, Resting]:
    """The servers that several files of tests share, once they have started, by their fixtures' names."""
    return {}


@pytest.fixture(autouse=True)
def servers_rest(request: pytest.FixtureRequest, shared: dict[str, Resting]) -> Iterator[None]:
    """After each test: whatever its requests were, nothing is left of them.

    Of the servers that several files share, those that the test has used are looked at as a whole. All that
    other tests have started are looked at for what runs, waits or holds blocks.
    """
    yield
    for name, resting in shared.items():
        if name in request.fixturenames:
            resting.check()
    for server in live_servers():
        if not any(server is resting.server for resting in shared.values()):
            server.rest()


@pytest.fixture(scope="session")
def server(default_model_dir: Path, leaving: Leaving, shared: dict[str, Resting]) -> Iterator[Server]:
    """The default model in float32, shared by the tests that do not change its state."""
    options = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-batched-tokens", "0")
    started = start_server(default_model_dir, *options)
    shared["server"] = Resting.of(started)
    yield started
    leaving.take(started)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint, which no test changes."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path, leaving: Leaving, shared: dict[str, Resting]) -> Iterator[Server]:
    """A tiny model in float32, shared by tests that do not change its state and need no sensible text."""
    options = ("--kv-cache-bytes", ROOMY)
    create_repository(tiny_dir.parent / "repository", tiny_dir, *options)
    with running(leaving, tiny_dir.parent / "repository") as server:
        shared["tiny"] = Resting.of(server)
        yield server


@pytest.fixture(scope="session")
def presets(
    tmp_path_factory: pytest.TempPathFactory, leaving: Leaving, shared: dict[str, Resting]
) -> Iterator[Server]:
    """Tiny models of every preset in one server; see `helpers.preset_server`."""
    folder = tmp_path_factory.mktemp("presets")
    repository = write_presets(folder)
    add_padded(repository)
    add_excluding(repository)
    with running(leaving, repository) as server:
        shared["presets"] = Resting.of(server)
        yield server


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("server")
