from __future__ import annotations

import pytest

from naiad.cli.console import use_log_format


@pytest.fixture(autouse=True)
def plain_messages() -> None:
    """A test that runs `naiad serve` in this process leaves its log's format behind."""
    use_log_format(None)
