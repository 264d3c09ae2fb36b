from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched once."""
    from naiad.cli.fetch_model import fetch_default_model

    return fetch_default_model(None)
