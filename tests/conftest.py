from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from perf.page.browser import Browser

# So that asserts of helpers hold with python -O too, as those of tests do.
pytest.register_assert_rewrite("helpers")

# Before torch is imported: a server under test needs the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if "PYTEST_XDIST_WORKER" in os.environ:
    # So does another worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-kernels", help="of engines whose test does not say; the default is that of EngineConfig"
    )
    parser.addoption(
        "--mixes", type=int, default=200, help="number of random mixes, tests/faults/test_mixes.py"
    )
    parser.addoption("--first-mix", type=int, default=0, help="seed of the first of them")
    faults = "only the tests of this row of the sixty faults in docs/reliability.md; may be repeated"
    parser.addoption("--fault", type=int, action="append", default=[], metavar="N", help=faults)
    parser.addoption("--native-flags", default="", help="of the compiler of the native kernels, after others")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_kernels is not None:
        from naiad.config import EngineConfig

        EngineConfig.__init__.__kwdefaults__["cpu_kernels"] = config.option.cpu_kernels
    if config.option.native_flags:
        from naiad_kernels.native import build

        build.COMPILE_FLAGS += tuple(config.option.native_flags.split())
        # A sanitizer that this process has is for its workers, not for other children such as the compiler.
        if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
            os.environ.pop("LD_PRELOAD", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that no worker begins the longest one at the end.

    What shows asserts of the product is skipped where Python leaves them out.
    """
    if config.option.fault:
        from helpers.fault_rows import fault_rows

        wanted = {path for number in config.option.fault for path in fault_rows()[number]}
        items[:] = [item for item in items if item.path in wanted]
    for item in items:
        if not __debug__ and item.get_closest_marker("asserts"):
            item.add_marker(pytest.mark.skip(reason="python -O leaves out asserts"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched once."""
    from naiad.cli.checkpoints.fetch import fetch_default_model

    return fetch_default_model(None)


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The same model as the GGUF file it was made from, fetched once."""
    from naiad.cli.checkpoints.fetch import fetch_default_gguf

    return fetch_default_gguf(None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; without one the test is skipped."""
    from perf.page.browser import missing, started

    if reason := missing():
        pytest.skip(reason)
    with started() as browser:
        yield browser
