"""The wall clock may jump; nothing that waits reads it."""

from __future__ import annotations

import ast
from pathlib import Path

import naiad

_ROOT = Path(naiad.__file__).parent
# Where the time of day is told to people and clients, and nowhere compared.
_TELL_THE_TIME = {
    "cli/console.py",
    "cli/serve/supervisor.py",
    "engine/step_record.py",
    "engine_process/serving/kv_event_publisher.py",
    "engine_process/serving/loop.py",
    "openai_server/api/engine_view.py",
    "openai_server/api/responses/writer.py",
    "openai_server/api/writers.py",
    "openai_server/engines/remote/models.py",
    "openai_server/metrics_routes.py",
    "recording/recorder.py",
    "tracing/exporter.py",
    # A chat template may ask for the date.
    "tokenization/template_sandbox.py",
    # Times of files are of that clock; a file that is as young as the question is never remembered.
    "engine_process/serving/usage_reports.py",
    "models/file_hashes.py",
}


def reads_the_wall_clock(source: str) -> bool:
    """Whether a module calls `time.time`, `time.time_ns` or `datetime.now`, under any name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "now", "utcnow", "today"):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name in ("time", "datetime", "date"):
                return True
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            names = {each.name for each in node.names}
            if not names.isdisjoint(("time", "time_ns")):
                return True
    return False


def test_only_what_tells_the_time_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(_ROOT))
        for path in _ROOT.rglob("*.py")
        if reads_the_wall_clock(path.read_text(encoding="utf-8"))
    }
    assert found == _TELL_THE_TIME


def test_a_reader_of_the_wall_clock_is_found() -> None:
    assert reads_the_wall_clock("import time\ndeadline = time.time() + 5")
    assert reads_the_wall_clock("from time import time\ntime()")
    assert reads_the_wall_clock("import datetime\ndatetime.datetime.now()")
    assert not reads_the_wall_clock("import time\ndeadline = time.monotonic() + 5")
