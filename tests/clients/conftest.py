from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.served import Served
from helpers.server import start_server


@pytest.fixture(scope="session")
def served(default_model_dir: Path) -> Iterator[Served]:
    """The default model in float32, whose numbers are those of transformers."""
    server = start_server(default_model_dir, "--dtype", "float32", "--openai-port", "0")
    yield Served(server, default_model_dir)
    assert server.stop() == 0, "\n".join(server.lines[-40:])


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.expect_idle()
