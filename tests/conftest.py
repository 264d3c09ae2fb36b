from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: a server under test needs the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if "PYTEST_XDIST_WORKER" in os.environ:
    # So does another worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-kernels", help="of engines whose test does not say; the default is that of EngineConfig"
    )
    parser.addoption("--native-flags", default="", help="of the compiler of the native kernels, after others")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_kernels is not None:
        from naiad.config import EngineConfig

        EngineConfig.__init__.__kwdefaults__["cpu_kernels"] = config.option.cpu_kernels
    if config.option.native_flags:
        from naiad_kernels.native import build

        build.COMPILE_FLAGS += tuple(config.option.native_flags.split())
        # A sanitizer that this process has is not for its children, the compiler first of all.
        os.environ.pop("LD_PRELOAD", None)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched once."""
    from naiad.cli.checkpoints.fetch import fetch_default_model

    return fetch_default_model(None)
