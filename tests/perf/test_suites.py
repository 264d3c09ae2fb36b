from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from perf.suites import run
from perf.suites.outcomes import Outcome, Outcomes, read_record
from perf.suites.reasons import REASONS, Reason
from perf.suites.served import options_of_vllm

REASON_TABLE = (
    Reason("they need tools", r"/test_tools\.py", None),
    Reason("the status is OpenAI's", r"::test_wrong", r"assert 400 == 422"),
)
ROOT = Path(__file__).parents[2]


def test_a_reason_explains_only_the_failure_that_it_speaks_of() -> None:
    wrong = Outcome("tests/test_a.py::test_wrong[1]", "failed", "E   assert 400 == 422")
    other = Outcome("tests/test_a.py::test_wrong[2]", "failed", "E   assert 500 == 422")
    outcomes = Outcomes([wrong, other, Outcome("tests/test_a.py::test_right", "passed")], REASON_TABLE)
    assert outcomes.failures == [other]
    assert outcomes.explained == {"the status is OpenAI's": 1}
    assert outcomes.by_file().splitlines()[2:] == [
        "| test_a.py | 1 | 1 | 1 |  |  |  |",
        "| all | 1 | 1 | 1 | 0 | 0 | 0 |",
    ]
    assert "500 == 422" in outcomes.shown_failures()


def test_a_test_that_is_not_run_has_a_reason() -> None:
    outcomes = Outcomes([Outcome("tests/test_tools.py::test_call", "not run")], REASON_TABLE)
    assert outcomes.by_reason().splitlines()[2:] == ["| 1 | they need tools |"]


def test_a_failure_to_import_is_a_failure() -> None:
    outcomes = Outcomes([Outcome("tests/test_a.py", "not imported", "ImportError")], REASON_TABLE)
    assert [each.test for each in outcomes.failures] == ["tests/test_a.py"]


def test_the_worst_outcome_counts(tmp_path: Path) -> None:
    record = tmp_path / "record"
    found = [("a", "passed"), ("a", "failed"), ("b", "failed"), ("b", "passed")]
    lines = [json.dumps({"test": test, "outcome": outcome, "text": ""}) for test, outcome in found]
    record.write_text("\n".join(lines))
    assert [(each.test, each.outcome) for each in read_record(record)] == [("a", "failed"), ("b", "failed")]


def test_reasons_can_be_told_apart() -> None:
    for reasons in REASONS.values():
        assert len({reason.tests + str(reason.says) for reason in reasons}) == len(reasons)


def test_options_that_naiad_lacks_are_left_out() -> None:
    found = options_of_vllm(["--dtype", "float32", "--no-enable-prefix-caching", "--enforce-eager"])
    assert found == ["--enable-prefix-caching", "false"]


def test_the_suite_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: suite\nVersion: 1.2\n\nText\n")
    assert run.revision_of(tmp_path) == "suite 1.2"
    (tmp_path / "PKG-INFO").unlink()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit, match="--revision"):
        run.revision_of(tmp_path)


SUITE = {
    "__init__.py": "",
    "conftest.py": """
import pytest
from fastapi.testclient import TestClient
from tests.utils import setup_fastapi_app, setup_server

@pytest.fixture(scope="class")
def client():
    with TestClient(setup_fastapi_app(tokenizer="", server=setup_server("models"), backend="")) as made:
        yield made
""",
    "utils.py": "raise ImportError('the suite has been asked for its own server')",
    "test_a.py": """
class TestAll:
    def test_right(self, client):
        assert client.post("/v1/models").json() == {"path": "/v1/models", "model": "checkpoint"}

    def test_wrong(self, client):
        assert client.get("/v1/models").json() == {}
""",
    "test_completions.py": """
class TestBase:
    def test_model(self, client):
        assert client.get("/").json()["model"] == "base"
""",
    "test_tool_calling.py": """
class TestCalls:
    def test_model(self, client):
        assert client.get("/").json()["model"] == "tools"
""",
    "test_tools.py": "raise ImportError('this file is not run')\ndef test_call(): pass\n",
}
# Stands in for `naiad serve`: it answers with the path that it has been asked for, and its checkpoint.
FAKE_SERVE = """
import http.server, json, sys
checkpoint = sys.argv[sys.argv.index("--model") + 1]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"path": self.path, "model": checkpoint}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"ready: http=a grpc=b metrics=c openai=http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


def test_a_suite_meets_naiad_in_the_place_of_its_own_server(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name, text in SUITE.items():
        (tests / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    record = tmp_path / "record"
    environment = os.environ | {
        "NAIAD_SUITE_SERVE": json.dumps([sys.executable, "-c", FAKE_SERVE]),
        "NAIAD_SUITE_CHECKPOINT": "checkpoint",
        "NAIAD_SUITE_BASE_CHECKPOINT": "base",
        "NAIAD_SUITE_TOOL_CHECKPOINT": "tools",
        "NAIAD_SUITE_KIND": "triton",
        "NAIAD_SUITE_RECORD": str(record),
        "NAIAD_SUITE_NOT_RUN": json.dumps([r"/test_tools\.py"]),
        "TEST_MODEL": "model",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "pytest", "-p", "perf.suites.plugin", "-c", "pytest.ini", "-q", "tests"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = {each.test: each.outcome for each in read_record(record)}
    assert found == {
        "tests/test_a.py::TestAll::test_right": "passed",
        "tests/test_a.py::TestAll::test_wrong": "failed",
        "tests/test_completions.py::TestBase::test_model": "passed",
        "tests/test_tool_calling.py::TestCalls::test_model": "passed",
        "tests/test_tools.py::test_call": "not run",
    }
