"""What tenants use, from a real server: its metrics, its usage file and the report agree."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from helpers.server import Server, eventually, start_server, without_engine
from naiad.cli.main import main
from naiad.snapshot import tenant_label


def report(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, float]]:
    assert main(["report", str(path), "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    return {row["tenant"]: row for row in rows}


def ask(server: Server, tenant: str, max_tokens: int) -> None:
    body = {"text_input": "ab", "max_tokens": max_tokens, "cache_salt": tenant}
    assert server.post("/v2/models/text/generate", body)[0] == 200


def output_tokens_of(server: Server, tenant: str) -> float:
    """What the metrics tell; 0 until they tell anything of the tenant."""
    try:
        return server.metric("naiad_tenant_tokens_total", tenant=tenant_label(tenant), kind="output")
    except AssertionError:
        return 0


def test_metrics_file_and_report_agree_also_after_a_kill(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "usage"
    server = start_server(tiny_dir, "--kv-cache-bytes", "64000000", "--usage-file", str(path))
    try:
        ask(server, "a", 20)
        ask(server, "b", 10)
        ask(server, "b", 10)
        eventually(lambda: path.stat().st_size > 0 and output_tokens_of(server, "b") == 20)
        with without_engine(server):
            pass
        first = {"text_input": "a", "max_tokens": 1}
        eventually(lambda: server.post("/v2/models/text/generate", first)[0] == 200)
        ask(server, "a", 7)
        eventually(lambda: output_tokens_of(server, "a") == 27)
        step_s = server.metric("naiad_tenant_step_seconds_total", model="llm", tenant=tenant_label("a"))
    finally:
        server.stop()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rows = report(path, capsys, "--price-per-hour", "36")
    a, b = rows[tenant_label("a")], rows[tenant_label("b")]
    assert (a["num_output_tokens"], b["num_output_tokens"]) == (27, 20)
    assert a["step_s"] == pytest.approx(step_s, rel=1e-6)
    assert a["block_s"] > 0
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert sum(row["cost"] for row in rows.values()) > 0
