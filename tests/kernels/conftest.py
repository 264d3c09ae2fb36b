from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_interpreter import Interpret, interpreter


@pytest.fixture(scope="session")
def interpret() -> Iterator[Interpret]:
    with interpreter() as call:
        yield call
