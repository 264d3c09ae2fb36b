"""The header in which load balancers learn how busy the engines are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from naiad.errors import EngineAwayError
from naiad.openai_server import load_report
from naiad.openai_server.access.gate import Gate
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.guard import Guard
from naiad.openai_server.load_report import ANSWERED, ASKED, LoadReport, Rate
from naiad.outputs import EngineStats

BUSY = EngineStats(
    num_running=6, num_waiting=4, num_blocks=100, num_used_blocks=75, block_size=16, max_num_seqs=8
)
IDLE = EngineStats(num_blocks=50, block_size=32, max_num_seqs=4)


class FakeModel:
    def __init__(self, answer: EngineStats | Exception | float) -> None:
        self._answer = answer

    async def snapshot(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        if isinstance(self._answer, float):
            await asyncio.sleep(self._answer)
        return SimpleNamespace(snapshot=SimpleNamespace(stats=self._answer))


def header(
    *answers: EngineStats | Exception | float,
    asked: str | None = "json",
    status: int = 200,
    method: str = "GET",
    gate: Gate | None = None,
    key: str = "",
) -> str | None:
    """What one request is told of models that answer so."""

    async def served() -> str | None:
        models: Any = SimpleNamespace(
            by_name=lambda: {str(place): FakeModel(each) for place, each in enumerate(answers)}
        )

        async def answer(_request: web.Request) -> web.Response:
            return web.Response(status=status, text="whole")

        app = web.Application(middlewares=[Guard((), (), gate).middleware])
        app.on_response_prepare.append(LoadReport(models, gate).prepare)
        # Whoever has no key may ask for it.
        app.router.add_route("*", "/health", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        headers = {"Content-Type": "application/json"} | ({} if asked is None else {ASKED: asked})
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://{host}:{port}/health"
        async with ClientSession() as session, session.request(method, url, headers=headers) as got:
            assert (got.status, await got.text()) == (status, "whole")
            told = got.headers.get(ANSWERED)
        await runner.cleanup()
        return told

    return asyncio.run(served())


def test_both_formats_say_the_same() -> None:
    kind, _, report = (header(BUSY) or "").partition(" ")
    named = {
        "kv_cache_usage_perc": 0.75,
        "num_requests_waiting": 4.0,
        "kv_cache_utilization": 0.75,
        "max_token_capacity": 1600.0,
    }
    assert kind == "JSON"
    expected = {"application_utilization": 1.25, "rps_fractional": 0.0, "named_metrics": named}
    assert json.loads(report) == expected
    text = header(BUSY, asked=" TEXT ") or ""
    assert text.startswith("TEXT application_utilization=1.25, rps_fractional=0, named_metrics.kv_cache_")
    pairs = dict(each.split("=") for each in text.removeprefix("TEXT ").split(", ")[2:])
    assert {key: float(value) for key, value in pairs.items()} == {
        f"named_metrics.{name}": value for name, value in named.items()
    }


def test_the_rate_is_that_of_the_requests_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.at(5.0) == 0
    for place in range(400):
        rate.add(100 + place / 4)
    assert rate.at(200.0) == pytest.approx(4, rel=0.05)
    assert rate.at(300.0) < 0.001


def test_what_is_refused_does_not_count() -> None:
    def told(**fields: Any) -> float:
        return float(json.loads((header(BUSY, **fields) or "").removeprefix("JSON "))["rps_fractional"])

    assert told(method="POST") == pytest.approx(0.1, rel=0.01)
    assert told(method="POST", status=503) == 0
    assert told(method="GET") == 0


def test_several_engines_are_one_load() -> None:
    report = json.loads((header(IDLE, BUSY) or "").removeprefix("JSON "))
    assert report["application_utilization"] == 1.25
    assert report["named_metrics"]["kv_cache_usage_perc"] == 0.75
    assert report["named_metrics"]["max_token_capacity"] == 3200.0


@pytest.mark.parametrize("asked", [None, "", "xml"])
def test_who_does_not_ask_for_a_known_format_is_told_nothing(asked: str | None) -> None:
    assert header(BUSY, asked=asked) is None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of keys: a user "u" and an operator "o"."""
    keys = [
        {"name": name, "sha256": digest_of(name), "tenant": "t", "role": role}
        for name, role in (("u", "user"), ("o", "operator"))
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    return path


def test_where_there_are_keys_strangers_are_told_nothing(path: Path) -> None:
    gate = Gate(path)
    assert header(BUSY, gate=gate) is None
    assert header(BUSY, gate=gate, key="unknown") is None
    assert header(BUSY, gate=Gate(path, metrics_open=True)) == header(BUSY)


@pytest.mark.parametrize("asked", ["json", "text"])
def test_a_user_is_told_what_a_load_balancer_weighs_by_and_an_operator_everything(
    path: Path, asked: str
) -> None:
    gate = Gate(path)
    told = header(BUSY, gate=gate, key="u", asked=asked) or ""
    assert "application_utilization" in told
    assert "rps_fractional" in told
    assert "kv_cache" not in told
    assert "waiting" not in told
    assert header(BUSY, gate=gate, key="o", asked=asked) == header(BUSY, asked=asked)


def test_an_engine_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "PATIENCE_S", 0.01)
    for other in (EngineAwayError("away"), RuntimeError("a bug"), 3600.0):
        assert header(other) is None
        assert header(other, IDLE) == header(IDLE)
    assert header() is None
