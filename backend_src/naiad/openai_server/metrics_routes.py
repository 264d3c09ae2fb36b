"""The route `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor

from aiohttp import web

from naiad.frontend.request_families import DOOR, FATE, OPENAI_DOOR, CountedFates
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.engines.interface import Models
from naiad.openai_server.metrics.door_metrics import DoorMetrics
from naiad.openai_server.metrics.http_metrics import HTTPMetrics
from naiad.openai_server.metrics.text_format import CONTENT_TYPE, Page, Values
from naiad.openai_server.metrics.triton_metrics import PREFIXES, TritonMetrics
from naiad.openai_server.route import Route
from naiad.openai_server.streams import StreamWatch

# vLLM's labels.
_NO_ADAPTERS = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
_COLLECT_S = 1.0
# Triton's port shows this server's requests too, a moment later and without the gaps between tokens.
_OWN = f'{DOOR}="{OPENAI_DOOR}"'


class MetricsRoutes:
    """Counts, and shows what is counted here together with the engine's metrics.

    Attributes:
        http: has the middleware that counts requests.
    """

    def __init__(
        self,
        models: Models,
        bodies: BodyReader,
        watch: StreamWatch,
        triton: TritonMetrics,
        pool: Executor,
        fates: Sequence[CountedFates] = (),
        families: Sequence[Values] = (),
    ) -> None:
        """Set up.

        Args:
            models: the models whose requests are counted.
            bodies: counts the fields that it passes over.
            watch: knows the open streams.
            triton: the engine's metrics.
            pool: runs what would hold up the event loop.
            fates: what else is counted.
            families: counters that others keep.
        """
        self._fates = fates
        self._families = families
        self.http = HTTPMetrics()
        self._door = DoorMetrics()
        self._models = models
        self._bodies = bodies
        self._watch = watch
        self._triton = triton
        self._pool = pool

    def routes(self) -> list[Route]:
        """The routes that these handlers answer."""
        return [
            Route(
                method="GET",
                path="/metrics",
                handler=self.metrics,
                summary="Shows the metrics of the engines and of this server in Prometheus' text format.",
                media_type="text/plain",
            )
        ]

    async def metrics(self, _request: web.Request) -> web.Response:
        """Answer `GET /metrics`; without the engine's families while Triton's metrics port is away."""
        text = await self._triton.text()
        self.collect()
        page = Page()
        if text is not None:
            page.add_text(text, PREFIXES, without=_OWN if self._models.observes else None)
        for family in (*self._door.families(), *self.http.families(), *self._state(text is not None)):
            page.add(family)
        return web.Response(body=page.text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def run(self) -> None:
        """Collect for ever, so that observations do not pile up between scrapes."""
        while True:
            self.collect()
            await asyncio.sleep(_COLLECT_S)

    def collect(self) -> None:
        """Count what has been observed since the last call."""
        for model in self._models.by_name().values():
            if model.info is not None and self._models.observes:
                self._door.add_model(model.engine, model.info.max_model_len)
        for model, batch in self._models.take_observations():
            self._door.add_model(model.engine, model.max_model_len)
            self._door.take(model.engine, batch)
            if batch.first_token_s or batch.ended:
                asyncio.get_running_loop().run_in_executor(self._pool, model.report, batch)

    def _state(self, has_triton: bool) -> list[Values]:
        streams = Values("naiad_openai_open_streams", "Streams that are open now", "gauge")
        streams.set({}, len(self._watch.streams))
        triton = Values(
            "naiad_openai_triton_metrics_up",
            "Whether Triton's metrics port has answered this scrape",
            "gauge",
        )
        triton.set({}, int(has_triton))
        fields = Values(
            "naiad_openai_passed_over_fields_total", "Unknown fields that were passed over", "counter"
        )
        for name, count in self._bodies.passed_over.items():
            fields.set({"field": name}, count)
        return [
            self._cache_config(),
            self._adapters(),
            streams,
            triton,
            fields,
            *self._families,
            *map(_counted, self._fates),
        ]

    def _cache_config(self) -> Values:
        """The family by which gateways learn the size of each KV cache; its value is always 1."""
        family = Values("vllm:cache_config_info", "The KV cache: the labels say its size", "gauge")
        for name, model in self._models.by_name().items():
            if (info := model.info) is not None and info.stats.num_blocks:
                labels = {
                    "model": model.engine,
                    "model_name": name,
                    "block_size": str(info.stats.block_size),
                    "num_gpu_blocks": str(info.stats.num_blocks),
                }
                family.set(labels, 1)
        return family

    def _adapters(self) -> Values:
        """The family by which gateways learn of a model's adapters: there are none. Its value is the time."""
        family = Values("vllm:lora_requests_info", "Adapters of requests: Naiad has none", "gauge")
        for name, model in self._models.by_name().items():
            if model.info is not None:
                labels = {"model": model.engine, "model_name": name, **_NO_ADAPTERS}
                family.set(labels, time.time())
        return family


def _counted(each: CountedFates) -> Values:
    family = Values(each.family, each.description, "counter")
    for fate, count in each.counts().items():
        family.set({DOOR: OPENAI_DOOR, FATE: fate}, count)
    return family
