from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.proxied import NUM_RUNNING, NUM_WAITING
from helpers.replicas import Replicas
from helpers.tiny_repository import create_repository, tiny_checkpoint


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose engine is soon full."""
    folder = tmp_path_factory.mktemp("replicas")
    limits = ("--max-num-seqs", str(NUM_RUNNING), "--max-queued-requests", str(NUM_WAITING))
    options = (*limits, "--kv-cache-bytes", "64000000")
    create_repository(folder / "repository", tiny_checkpoint(folder / "checkpoint"), *options)
    return folder / "repository"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxies")


@pytest.fixture(scope="session")
def replicas(repository: Path) -> Iterator[Replicas]:
    """Three replicas, which all run when a test has ended."""
    started = Replicas(repository)
    yield started
    started.stop()
