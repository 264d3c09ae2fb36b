from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: a server under test needs the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched once."""
    from naiad.cli.fetch_model import fetch_default_model

    return fetch_default_model(None)
