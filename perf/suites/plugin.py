"""A plugin of pytest that lets a suite's tests meet Naiad, and writes down what became of each.

It runs in the suite's environment. The runner sets the variables.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from perf.suites import stand_ins, variables
from perf.suites.kinds import KINDS

_MAX_TEXT = 8_000
# Tools are a part of the prompt.
_ROOM_FOR_TOOLS = ("--max-model-len", "1024")
_MARKERS = ("openai", "fastapi", "asyncio", "slow_test", "skip_global_cleanup", "core_model", "cpu_test")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace the modules that start servers, before any file of the suite is imported."""
    if os.environ[variables.KIND] == "vllm":
        stand_ins.stand_in_for_vllm()
    else:
        stand_ins.stand_in_for_triton()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the suites' markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test is run."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    if collection_path.suffix != ".py" or not _is_kept_back(path):
        return None
    for node in ast.walk(ast.parse(collection_path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            _record(f"{path}::{node.name}", "not run")
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what tests no server, and what the runner leaves out."""
    kept, gone = [], []
    for item in items:
        if os.environ[variables.KIND] == "vllm" and not _meets_a_server(item):
            _record(item.nodeid, "in process")
            gone.append(item)
        elif _is_kept_back(item.nodeid):
            _record(item.nodeid, "not run")
            gone.append(item)
        else:
            kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=gone)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the checkpoint before a fixture starts a server."""
    kind = KINDS[os.environ[variables.KIND]]
    variable, stand_ins.more_options = variables.CHECKPOINT, ()
    if re.search(kind.base_files, item.nodeid):
        variable = variables.BASE_CHECKPOINT
    elif re.search(kind.tool_files, item.nodeid):
        variable, stand_ins.more_options = variables.TOOL_CHECKPOINT, _ROOM_FOR_TOOLS
    stand_ins.checkpoint = os.environ[variable]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that can not be imported."""
    if report.failed:
        _record(report.nodeid, "not imported", report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down a test's outcome: that of its call, or of a fixture that failed or skipped it."""
    if report.when == "call" or not report.passed:
        is_xfail = hasattr(report, "wasxfail")
        outcome = "skipped" if report.skipped else report.outcome
        _record(report.nodeid, "passed" if is_xfail and report.passed else outcome, report.longreprtext)


def pytest_unconfigure() -> None:
    """Stop the servers that tests shared."""
    stand_ins.stop_shared_servers()


def _is_kept_back(test: str) -> bool:
    return any(re.search(pattern, test) for pattern in json.loads(os.environ[variables.NOT_RUN]))


def _meets_a_server(item: Any) -> bool:
    fixtures = item.fixturenames
    return any("server" in name for name in fixtures) or "RemoteOpenAIServer(" in inspect.getsource(item.obj)


def _record(test: str, outcome: str, text: str = "") -> None:
    line = {"test": test, "outcome": outcome, "text": text[-_MAX_TEXT:]}
    with Path(os.environ[variables.RECORD]).open("a", encoding="utf-8") as record:
        record.write(json.dumps(line) + "\n")
