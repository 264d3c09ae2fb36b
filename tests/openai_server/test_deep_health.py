"""`/health/deep`: one inference for many probes, and a model that fails is named."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from naiad.engine_process.protocol import Checkpoint, Ready
from naiad.errors import EngineAwayError, InternalError, UnavailableError
from naiad.openai_server import health_routes
from naiad.openai_server.api.errors import APIError, unknown_model
from naiad.openai_server.api.tally import SequenceDelta
from naiad.openai_server.app import HEALTH, ServerOptions, make_app
from naiad.openai_server.health_routes import HealthRoutes
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason

READY = Ready(
    checkpoint=Checkpoint("/model", "first"),
    created_s=0,
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=[2],
    max_num_seqs=4,
    stats=EngineStats(),
)


class FakeModel:
    """A model whose generations wait for `go`, and end with `reason` or an error."""

    def __init__(self) -> None:
        self.has_token_ids = True
        self.go = asyncio.Event()
        self.reason = FinishReason.LENGTH
        self.error: Exception | None = None
        self.asked: list[Any] = []
        self.num_closed = 0
        self.token_counts = itertools.repeat(0)

    async def snapshot(self) -> Any:
        stats = EngineStats(total_prompt_tokens=3, total_generation_tokens=next(self.token_counts))
        return SimpleNamespace(snapshot=SimpleNamespace(stats=stats))

    async def loaded(self) -> Any:
        return SimpleNamespace(info=READY)

    async def begin(self, _loaded: Any, read: Callable[[Any], Any]) -> tuple[Any, FakeModel]:
        reader = SimpleNamespace(completion=lambda body, _request_id: body)
        self.asked.append(read(reader))
        request = SimpleNamespace(
            num_sequences=1, rows=[None], outputs=SimpleNamespace(num_sequences=1), drops_tokens=False
        )
        return SimpleNamespace(request=request, drops_tokens=False), self

    async def next(self) -> list[SequenceDelta]:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [SequenceDelta(0, "a", RequestOutput(1, [7], finish_reason=self.reason))]

    def close(self) -> None:
        self.num_closed += 1


class FakeModels:
    """Models by name; `away` are expected back."""

    def __init__(self, *names: str) -> None:
        self.there = {name: FakeModel() for name in names}
        self.away: list[str] = []

    def by_name(self) -> dict[str, FakeModel]:
        return self.there

    def expected(self) -> list[str]:
        return [*self.there, *self.away]

    def get(self, name: str) -> FakeModel:
        if name in self.away:
            raise EngineAwayError(f"the model {name} does not serve now")
        if name not in self.there:
            raise unknown_model(name)
        return self.there[name]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def routes_of(models: FakeModels, timeout_s: float = 30, cache_s: float = 30) -> HealthRoutes:
    made: Any = models
    return HealthRoutes(made, timeout_s, cache_s)


async def ask(routes: HealthRoutes, query: str = "") -> tuple[int, dict[str, Any]]:
    response: web.Response = await routes.deep_health(make_mocked_request("GET", f"/health/deep{query}"))
    assert response.content_type == "application/json"
    return response.status, json.loads(response.body)


def test_many_probes_at_once_and_soon_after_share_one_inference() -> None:
    async def test() -> None:
        models = FakeModels("first", "second")
        routes = routes_of(models)
        asking = [asyncio.create_task(ask(routes)) for _ in range(50)]
        await asyncio.sleep(0)
        for model in models.there.values():
            model.go.set()
        answers = [await each for each in asking] + [await ask(routes, "?model=second")]
        assert {status for status, _ in answers} == {200}
        assert answers[0][1]["models"].keys() == {"first", "second"}
        assert answers[-1][1]["models"].keys() == {"second"}
        for model in models.there.values():
            (body,) = model.asked
            assert (body.prompt, body.max_tokens) == ([[2]], 1)
            assert model.num_closed == 1

    run(test)


def test_it_is_not_ready_once_it_is_to_stop() -> None:
    async def test() -> None:
        routes = routes_of(FakeModels("first"))
        request = make_mocked_request("GET", "/health")
        assert (await routes.health(request)).status == 200
        routes.announce_stop()
        with pytest.raises(APIError, match="shutting down") as refusal:
            await routes.health(request)
        assert (refusal.value.status, refusal.value.headers) == (503, {"Retry-After": "1"})

    run(test)


def test_a_connection_ends_with_its_next_answer_once_the_server_is_to_stop() -> None:
    async def test() -> None:
        async with TestClient(TestServer(make_app(ServerOptions(server_pid=os.getpid())))) as client:
            before = await client.get("/v1/models")
            client.app[HEALTH].announce_stop()
            after = await client.get("/v1/models")
        assert (before.status, before.headers.get("Connection")) == (200, None)
        assert (after.status, after.headers.get("Connection")) == (200, "close")

    run(test)


def test_a_result_is_not_kept_for_longer_than_asked() -> None:
    async def test() -> None:
        models = FakeModels("first")
        models.there["first"].go.set()
        routes = routes_of(models, cache_s=0)
        await ask(routes)
        await ask(routes)
        assert len(models.there["first"].asked) == 2

    run(test)


def test_a_client_that_leaves_does_not_end_what_others_wait_for() -> None:
    async def test() -> None:
        models = FakeModels("first")
        routes = routes_of(models)
        leaving, staying = (asyncio.create_task(ask(routes)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        models.there["first"].go.set()
        assert (await staying)[0] == 200
        assert leaving.cancelled()

    run(test)


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        (lambda model: None, "it has made no token in 0.05 s"),
        (lambda model: vars(model).update(error=UnavailableError("the queue is full")), "the queue is full"),
        (lambda model: vars(model).update(error=APIError(500, "broken")), "broken"),
        (lambda model: vars(model).update(reason=FinishReason.TIMEOUT), "its deadline passed"),
    ],
)
def test_a_model_that_makes_no_token_is_named(
    fail: Callable[[FakeModel], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_routes, "_PROGRESS_S", 0.3)

    async def test() -> None:
        models = FakeModels("first", "second")
        models.there["first"].go.set()
        broken = models.there["second"]
        fail(broken)
        if broken.error is not None or broken.reason is FinishReason.TIMEOUT:
            broken.go.set()
        status, answer = await ask(routes_of(models, timeout_s=0.05))
        assert status == 503
        assert {name: each["status"] for name, each in answer["models"].items()} == {
            "first": "ok",
            "second": "failed",
        }
        assert says in answer["models"]["second"]["error"]
        assert "`second`" in answer["error"]["message"]
        assert "`first`" not in answer["error"]["message"]
        assert answer["error"]["type"] == "service_unavailable_error"
        assert broken.num_closed == 1

    run(test)


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        (lambda model: None, "it has made no token in 0.05 s"),
        (lambda model: vars(model).update(error=UnavailableError("the queue is full")), "the queue is full"),
        (lambda model: vars(model).update(reason=FinishReason.TIMEOUT), "its deadline passed"),
    ],
)
def test_a_model_that_makes_tokens_for_others_is_busy(fail: Callable[[FakeModel], None], says: str) -> None:
    async def test() -> None:
        models = FakeModels("first")
        model = models.there["first"]
        model.token_counts = iter([7, 7, 8])
        fail(model)
        if model.error is not None or model.reason is FinishReason.TIMEOUT:
            model.go.set()
        status, answer = await ask(routes_of(models, timeout_s=0.05))
        assert (status, answer["models"]["first"]["status"]) == (200, "busy")
        assert says in answer["models"]["first"]["error"]
        assert "error" not in answer

    run(test)


def test_a_model_that_fails_is_not_busy() -> None:
    async def test() -> None:
        models = FakeModels("first")
        model = models.there["first"]
        model.token_counts = itertools.count()
        model.error = InternalError("the engine failed")
        model.go.set()
        assert (await ask(routes_of(models)))[0] == 503

    run(test)


def test_a_model_whose_engine_is_away_fails_and_an_unknown_one_is_404() -> None:
    async def test() -> None:
        models = FakeModels("first")
        models.there["first"].go.set()
        models.away = ["second"]
        routes = routes_of(models)
        status, answer = await ask(routes)
        assert (status, answer["models"]["second"]["status"]) == (503, "failed")
        assert (await ask(routes, "?model=first"))[0] == 200
        await expect(404, "third", ask(routes, "?model=third"))
        await expect(400, "modle", ask(routes, "?modle=first"))
        await expect(503, "No model", ask(routes_of(FakeModels())))

    run(test)


async def expect(status: int, text: str, asking: Awaitable[Any]) -> None:
    with pytest.raises(APIError, match=text) as caught:
        await asking
    assert caught.value.status == status


def test_a_bug_fails_its_requests_but_is_not_kept() -> None:
    async def test() -> None:
        models = FakeModels("first")
        model = models.there["first"]
        model.go.set()
        model.error = RuntimeError("a bug")
        routes = routes_of(models)
        with pytest.raises(RuntimeError):
            await ask(routes)
        model.error = None
        assert (await ask(routes))[0] == 200

    run(test)


def test_the_end_of_the_server_ends_inferences() -> None:
    async def test() -> None:
        models = FakeModels("first")
        routes = routes_of(models)
        asking = asyncio.create_task(ask(routes))
        while not models.there["first"].asked:
            await asyncio.sleep(0)
        await routes.close()
        assert models.there["first"].num_closed == 1
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(test)
