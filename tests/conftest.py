from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: a server under test needs the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if "PYTEST_XDIST_WORKER" in os.environ:
    # So does another worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched once."""
    from naiad.cli.checkpoints.fetch import fetch_default_model

    return fetch_default_model(None)
