"""Where there is no memory, native kernels refuse a step instead of ending the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers import native_memory_child


@pytest.mark.parametrize("case", native_memory_child.CASES)
def test_a_step_without_memory_is_refused(case: str) -> None:
    child = subprocess.run(
        [sys.executable, native_memory_child.__file__, case],
        env={**os.environ, **native_memory_child.ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
