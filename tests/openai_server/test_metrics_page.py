"""The page of metrics: valid, each family in one piece, each request counted once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from helpers.prometheus import read_page
from naiad.engine_process.observations import Ended, ObservationBatch
from naiad.openai_server.metrics.door_metrics import DoorMetrics
from naiad.openai_server.metrics.http_metrics import HTTPMetrics
from naiad.openai_server.metrics.text_format import Family, Histograms, Page, Values
from naiad.openai_server.metrics.triton_metrics import PREFIXES, TritonMetrics
from naiad.openai_server.streams import EventStream, StreamWatch
from naiad.outputs import Timings
from naiad.sequence import FinishReason

TRITONS = """\
# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
nv_inference_count{model="llm",version="1"} 5
# HELP vllm:request_success_total Requests that have ended
# TYPE vllm:request_success_total counter
vllm:request_success_total{door="triton",model="llm",version="1",finished_reason="stop"} 3
vllm:request_success_total{door="openai",model="llm",version="1",finished_reason="stop"} 8
# HELP vllm:empty Nothing yet
# TYPE vllm:empty gauge
# HELP vllm:num_requests_running State of the engine
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="llm",version="1"} 2
"""
OPENAI = 'door="openai"'


def page_of(*families: Family, text: str = "") -> str:
    page = Page()
    page.add_text(text, PREFIXES, without=OPENAI)
    for family in families:
        page.add(family)
    return page.text()


def test_labels_are_escaped_and_numbers_are_exact() -> None:
    family = Values("naiad_a_total", "A.", "counter")
    strange = 'a"b\\c\nd}, x="1'
    family.add({"field": strange})
    family.add({"field": strange}, 2**53 - 1)
    family.add({"field": "y"}, 0.1)
    text = page_of(family)
    assert r'field="a\"b\\c\nd}, x=\"1"' in text
    scrape = read_page(text)
    assert sorted(scrape.values("naiad_a_total")) == [0.1, 2**53]


def test_a_histogram_counts_values_at_a_bound_below_it() -> None:
    family = Histograms("naiad_h", "H.", [1.0, 2.5])
    for value, times in ((1.0, 1), (1.1, 2), (2.5, 1), (3.0, 4)):
        family.observe({"door": "openai"}, value, times)
    scrape = read_page(page_of(family))
    assert [scrape.value("naiad_h_bucket", le=le) for le in ("1", "2.5", "+Inf")] == [1, 4, 8]
    assert scrape.value("naiad_h_sum") == pytest.approx(1 + 2.2 + 2.5 + 12)


def test_families_of_both_sources_are_one_piece_and_requests_are_counted_once() -> None:
    ends = Values("vllm:request_success_total", "Another description", "counter")
    ends.add({"model": "llm", "door": "openai", "finished_reason": "stop"}, 9)
    scrape = read_page(page_of(ends, text=TRITONS))
    assert scrape.families.keys() == {"vllm:request_success_total", "vllm:num_requests_running"}
    assert scrape.value("vllm:request_success_total", door="openai") == 9
    assert scrape.value("vllm:request_success_total", door="triton") == 3
    assert scrape.value("vllm:num_requests_running") == 2


@pytest.mark.parametrize(
    "line",
    ["vllm:num_requests_running{", "vllm:other 3", "nonsense", "", "# EOF", "vllm:num_requests_running"],
)
def test_lines_that_are_no_samples_of_their_family_are_dropped(line: str) -> None:
    assert page_of(text=TRITONS + line + "\n") == page_of(text=TRITONS)


def ended(reason: FinishReason, num_tokens: int) -> Ended:
    return Ended(reason, 3.0, Timings(1.0, 2.0, 2.5, 4.0), 7, num_tokens, 1)


def test_requests_of_this_door_are_counted_as_tritons_are() -> None:
    door = DoorMetrics()
    for model, length in (("llm", 100), ("other_llm", 5000)):
        door.add_model(model, length)
        door.add_model(model, length * 2)
    batch = ObservationBatch([0.03], [(0.02, 4)], [ended(FinishReason.STOP, 5)])
    refused = Ended(FinishReason.ERROR, 1.0, Timings(), 7, 0, 1)
    for each in (batch, ObservationBatch(ended=[refused])):
        door.take("llm", each)
    scrape = read_page(page_of(*door.families()))
    llm = {"model": "llm", "door": "openai"}
    reasons = ("stop", "length", "abort", "error", "timeout")
    ends = [scrape.value("vllm:request_success_total", **llm, finished_reason=each) for each in reasons]
    assert ends == [1, 0, 0, 1, 0]
    assert scrape.value("vllm:time_to_first_token_seconds_count", **llm) == 1
    assert scrape.value("vllm:time_per_output_token_seconds_count", **llm) == 4
    assert scrape.value("vllm:time_per_output_token_seconds_sum", **llm) == pytest.approx(0.08)
    assert scrape.value("vllm:e2e_request_latency_seconds_count", **llm) == 1
    assert scrape.value("vllm:request_prefill_time_seconds_sum", **llm) == 0.5
    length = {"response_metric_type": "total_output_tokens"}
    assert scrape.value("nv_llm_output_token_len_sum", **llm, **length) == 5
    assert scrape.value("vllm:request_prompt_tokens_count", model="other_llm") == 0
    assert scrape.values("vllm:request_prompt_tokens_bucket", model="other_llm", le="5000") == [0]
    assert not scrape.values("vllm:request_prompt_tokens_bucket", model="llm", le="200")


async def called(app: web.Application, call: Callable[[TestClient], Awaitable[None]]) -> None:
    async with TestClient(TestServer(app, handler_cancellation=True)) as client:
        await call(client)


def test_requests_are_counted_by_route_and_status_and_clients_make_no_metrics() -> None:
    http = HTTPMetrics()

    async def answer(request: web.Request) -> web.Response:
        if request.match_info["name"] == "bad":
            raise web.HTTPBadRequest
        return web.Response()

    @web.middleware
    async def guard(request: web.Request, handler: Callable[..., Awaitable[web.Response]]) -> web.Response:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status)

    app = web.Application(middlewares=[http.middleware, guard])
    app.router.add_get("/a/{name:.+}", answer)

    async def call(client: TestClient) -> None:
        for path in ("/a/x", "/a/y/z", "/a/bad", "/nothing", "/b"):
            await client.get(path)
        await client.request("PROPFIND", "/a/x")

    asyncio.run(called(app, call))
    scrape = read_page(page_of(*http.families()))
    name = "naiad_openai_requests_total"
    assert {
        (labels["method"], labels["route"], labels["status"]): value
        for (_, its), value in scrape.families[name].samples.items()
        for labels in [dict(its)]
    } == {
        ("GET", "/a/{name}", "200"): 2,
        ("GET", "/a/{name}", "400"): 1,
        ("GET", "other", "404"): 2,
        ("other", "other", "405"): 1,
    }
    duration = "naiad_openai_request_duration_seconds_count"
    assert scrape.value(duration, door="openai", route="/a/{name}") == 3


def test_a_client_that_leaves_is_counted_as_gone() -> None:
    http = HTTPMetrics()

    async def call(client: TestClient) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.get("/slow"), 0.2)
        while not http.families()[0].samples():
            await asyncio.sleep(0.01)

    async def sleep(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application(middlewares=[http.middleware])
    app.router.add_get("/slow", sleep)
    asyncio.run(called(app, call))
    scrape = read_page(page_of(*http.families()))
    assert scrape.value("naiad_openai_requests_total", status="499", route="/slow") == 1


def test_a_client_whose_stream_can_not_be_written_is_counted_as_gone() -> None:
    """Its handler is not always cancelled: a write may fail before."""
    http = HTTPMetrics()

    async def stream(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, lambda: None)
        await stream.open()
        if "leaves" in request.query:
            stream.abort()
            with contextlib.suppress(ConnectionResetError):
                while True:
                    await stream.write(b"data: x\n\n")
        return stream.response

    async def call(client: TestClient) -> None:
        await (await client.get("/stream")).read()
        with contextlib.suppress(aiohttp.ClientError):
            await (await client.get("/stream?leaves")).read()
        while len(http.families()[0].samples()) < 2:
            await asyncio.sleep(0.01)

    app = web.Application(middlewares=[http.middleware])
    app.router.add_get("/stream", stream)
    asyncio.run(called(app, call))
    scrape = read_page(page_of(*http.families()))
    for status in ("200", "499"):
        assert scrape.value("naiad_openai_requests_total", status=status, route="/stream") == 1


def test_a_client_whose_long_answer_can_not_begin_is_counted_as_gone() -> None:
    http = HTTPMetrics()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await StreamWatch(60, 60).answer(request, b"x" * 100_000)

    async def call(client: TestClient) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            await client.get("/answer")
        while not http.families()[0].samples():
            await asyncio.sleep(0.01)

    app = web.Application(middlewares=[http.middleware])
    app.router.add_get("/answer", answer)
    asyncio.run(called(app, call))
    scrape = read_page(page_of(*http.families()))
    assert scrape.value("naiad_openai_requests_total", status="499", route="/answer") == 1


def test_a_metrics_port_that_fails_or_is_away_gives_nothing() -> None:
    app = web.Application()

    async def fail(_request: web.Request) -> web.Response:
        return web.Response(status=500, text=TRITONS)

    async def show(_request: web.Request) -> web.Response:
        return web.Response(text=TRITONS)

    app.router.add_get("/fails", fail)
    app.router.add_get("/metrics", show)
    found = []

    async def call(client: TestClient) -> None:
        found.append(await TritonMetrics(str(client.make_url("/metrics"))).text())
        found.append(await TritonMetrics(str(client.make_url("/fails"))).text())
        url = str(client.make_url("/metrics"))
        await client.close()
        found.append(await TritonMetrics(url).text())

    asyncio.run(called(app, call))
    assert found == [TRITONS, None, None]
    assert asyncio.run(TritonMetrics(None).text()) is None
