"""Puts the server together: its routes, and what runs beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from naiad.errors import place_of
from naiad.freed_memory import give_back_memory
from naiad.frontend.request_families import OPENAI_DOOR
from naiad.openai_server.access.gate import Gate
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.connections import ConnectionWatch
from naiad.openai_server.engine_routes import EngineRoutes
from naiad.openai_server.engine_watch import EngineWatch
from naiad.openai_server.engines.interface import Models
from naiad.openai_server.engines.local_models import LocalModels
from naiad.openai_server.fallbacks import Fallbacks
from naiad.openai_server.generate import GenerateRoutes
from naiad.openai_server.guard import Guard
from naiad.openai_server.health_routes import HealthRoutes
from naiad.openai_server.load_report import LoadReport
from naiad.openai_server.metrics.triton_metrics import TritonMetrics
from naiad.openai_server.metrics_routes import MetricsRoutes
from naiad.openai_server.model_routes import ModelRoutes
from naiad.openai_server.openapi import with_description
from naiad.openai_server.page_routes import PageRoutes
from naiad.openai_server.route import add_routes
from naiad.openai_server.streams import StreamWatch
from naiad.recording.record_file import RecordFile
from naiad.recording.recorder import Recorder
from naiad.tracing.exporter import Collector, SpanExporter
from naiad.tracing.request_trace import Tracer
from naiad.tracing.span import process_attributes

if TYPE_CHECKING:
    from naiad.openai_server.engines.remote.models import RemoteServer

# What says whether the server is ready.
HEALTH = web.AppKey("health", HealthRoutes)
_NUM_THREADS = 4
_AGAIN_S = 1.0
_GIVE_BACK_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The server's settings.

    Attributes:
        server_pid: the process above the Triton servers whose models it offers, by their engines' sockets.
        remote: the server whose models it offers instead, by its gRPC port.
        allowed_hosts: names that a request's Host may have, besides addresses and localhost.
        allowed_origins: origins whose pages may call the server.
        max_body_bytes: largest body of a request.
        is_lenient: pass over unknown fields of bodies, and count them.
        metrics_url: address of the page of Triton's metrics port; None: the engine's metrics are not shown.
        families: how the families are chosen that say how a model writes.
        record: the file in which requests are recorded; None: they are not.
        records_prompts: record prompts and outputs too.
        collector: gets the spans of requests; None: they are not traced.
        fallbacks: models that answer in place of others.
        keep_alive_s: a stream that is silent for so long gets a comment.
        slow_reader_s: a client that takes nothing for so long is gone.
        header_timeout_s: a connection that has not sent the headers of a request in this time is closed.
        deep_health_timeout_s: a model that makes no token in this time has failed.
        deep_health_cache_s: how long the result of `/health/deep` is kept.
        parent_pid: the process with which this one ends; None: the one above it.
    """

    server_pid: int = 0
    remote: RemoteServer | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    is_lenient: bool = False
    metrics_url: str | None = None
    families: FamilyChoices = field(default_factory=FamilyChoices)
    record: Path | None = None
    records_prompts: bool = False
    collector: Collector | None = None
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    keep_alive_s: float = 15.0
    slow_reader_s: float = 60.0
    header_timeout_s: float = 30.0
    deep_health_timeout_s: float = 10.0
    deep_health_cache_s: float = 5.0
    parent_pid: int | None = None


def make_app(
    options: ServerOptions, gate: Gate | None = None, connections: ConnectionWatch | None = None
) -> web.Application:
    """Make the application.

    Args:
        options: its settings.
        gate: checks the keys of its clients.
        connections: watches the connections that it is served on.
    """
    pool = ThreadPoolExecutor(_NUM_THREADS, "openai")
    records = None if options.record is None else RecordFile(options.record)
    models = _models(options, pool, records)
    watch = StreamWatch(options.keep_alive_s, options.slow_reader_s)
    bodies = BodyReader(pool, is_lenient=options.is_lenient)
    guard = Guard(options.allowed_hosts, options.allowed_origins, gate)
    health = HealthRoutes(models, options.deep_health_timeout_s, options.deep_health_cache_s)
    around = [] if connections is None else [connections.middleware]
    spans = None
    if options.collector is not None:
        spans = SpanExporter(options.collector, process_attributes("naiad-openai"))
    fates = [each for each in (spans, records) if each is not None]
    triton = TritonMetrics(options.metrics_url)
    metrics = MetricsRoutes(models, bodies, watch, triton, pool, fates, [options.fallbacks.counted])
    app = web.Application(
        middlewares=[*around, metrics.http.middleware, guard.middleware],
        client_max_size=options.max_body_bytes,
    )
    app[HEALTH] = health
    app.on_response_prepare.append(guard.prepare)
    app.on_response_prepare.append(LoadReport(models, gate).prepare)
    app.on_response_prepare.append(health.prepare)
    tracer = None if spans is None else Tracer(spans)
    generate = GenerateRoutes(models, bodies, watch, tracer, options.fallbacks)
    others = ModelRoutes(models, bodies, pool)
    engine_watch = EngineWatch(models.get)
    engines = EngineRoutes(models, engine_watch, watch)
    handlers = (generate, others, engines, health, metrics, PageRoutes())
    add_routes(app, with_description([route for each in handlers for route in each.routes()]))

    async def run_beside(_app: web.Application) -> AsyncIterator[None]:
        await models.look()
        if options.remote is not None:
            # `naiad serve` knows its models, and has looked before.
            for pair, problem in options.fallbacks.unknown(models.by_name()):
                logger.warning("--fallback %s: %s, until the server loads it", pair, problem)
        beside = (models.watch, watch.run, metrics.run, _give_back_memory)
        tasks = [asyncio.create_task(_run_for_ever(each)) for each in beside]
        yield
        engine_watch.close()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await health.close()
        await models.close()
        for each in fates:
            await asyncio.to_thread(each.close)
        pool.shutdown(wait=False)

    app.cleanup_ctx.append(run_beside)
    return app


def _models(options: ServerOptions, pool: ThreadPoolExecutor, records: RecordFile | None) -> Models:
    if options.remote is None:
        make_recorder = None
        if records is not None:
            make_recorder = partial(Recorder, records, OPENAI_DOOR, with_prompts=options.records_prompts)
        return LocalModels(options.server_pid, pool, options.families, make_recorder)
    # Imported only where it is used because gRPC takes a while to import.
    from naiad.openai_server.engines.remote.models import RemoteModels

    return RemoteModels(options.remote, pool)


async def _give_back_memory() -> None:
    """Return freed memory to the system from time to time.

    Python makes its dict of interned strings anew every so many requests, in free room of the heap or in
    memory of its own. In the second case the C library would keep that room too: 2 MB that come and go.
    """
    while True:
        await asyncio.sleep(_GIVE_BACK_S)
        await asyncio.to_thread(give_back_memory)


async def _run_for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """Run what runs beside the server; if it fails, it begins again."""
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 — whatever it is, the server needs what runs beside it
            logger.error("what runs beside the server failed, and begins again: %s", place_of(error))
        await asyncio.sleep(_AGAIN_S)
