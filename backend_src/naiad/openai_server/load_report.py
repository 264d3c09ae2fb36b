"""Tells load balancers how busy the engines are, in a header of the answer, as ORCA defines it.

A load balancer asks with the request's header `endpoint-load-metrics-format`, "text" or "json", as vLLM's and
Triton's servers are asked. The names are those of both: `kv_cache_usage_perc` and `num_requests_waiting` are
vLLM's, `kv_cache_utilization` and `max_token_capacity` Triton's. Proxies that weigh replicas divide
`rps_fractional` by `application_utilization`. Source: the ORCA load report of https://github.com/cncf/xds
(xds/data/orca/v3/orca_load_report.proto).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from naiad.openai_server.access.gate import Gate, caller_of
from naiad.openai_server.engines.interface import Models
from naiad.outputs import EngineStats

ASKED, ANSWERED = "endpoint-load-metrics-format", "endpoint-load-metrics"
# An engine that does not answer between two steps within this time holds no answer up.
PATIENCE_S = 0.25
# Over how many seconds requests are counted.
_SPAN_S = 10.0


class LoadReport:
    """Adds the header to answers."""

    def __init__(self, models: Models, gate: Gate | None = None) -> None:
        """Report the load of these models; `gate` checks keys, None: nobody needs one."""
        self._models = models
        self._gate = gate
        self._requests = Rate()

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the header if the request asks for it and an engine answers; what is not known is left out."""
        if request.method == "POST" and response.status < 400:
            self._requests.add(time.monotonic())
        write = {"text": as_text, "json": as_json}.get(request.headers.get(ASKED, "").strip().lower())
        caller = caller_of(request)
        is_open = self._gate is None or self._gate.metrics_open
        if write is None or (caller is None and not is_open):
            return
        found = await self._stats()
        if found:
            # How full the cache is tells when others send prompts, and how long these are.
            named = named_metrics(found) if is_open or (caller and caller.key.role == "operator") else {}
            rate = self._requests.at(time.monotonic())
            response.headers[ANSWERED] = write(utilization(found), rate, named)

    async def _stats(self) -> list[EngineStats]:
        asked = [asyncio.ensure_future(model.snapshot()) for model in self._models.by_name().values()]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=PATIENCE_S)
        for each in late:
            each.cancel()
        # What can not be asked now is left out; the answer is not held up or spoilt by it.
        return [each.result().snapshot.stats for each in done if each.exception() is None]


class Rate:
    """Events per second, of which older ones count less and less."""

    def __init__(self) -> None:
        """Start with none."""
        self._rate, self._at_s = 0.0, 0.0

    def add(self, now_s: float) -> None:
        """Count one; `now_s` never goes back."""
        self._rate, self._at_s = self.at(now_s) + 1 / _SPAN_S, now_s

    def at(self, now_s: float) -> float:
        """The rate at this time."""
        return self._rate * math.exp((self._at_s - now_s) / _SPAN_S)


def named_metrics(stats: Sequence[EngineStats]) -> dict[str, float]:
    """The metrics of all engines: waiting requests and tokens add up, the fullest cache counts."""
    use = max(each.num_used_blocks / max(each.num_blocks, 1) for each in stats)
    return {
        "kv_cache_usage_perc": round(use, 4),
        "num_requests_waiting": float(sum(each.num_waiting for each in stats)),
        "kv_cache_utilization": round(use, 4),
        "max_token_capacity": float(sum(each.num_blocks * each.block_size for each in stats)),
    }


def utilization(stats: Sequence[EngineStats]) -> float:
    """How busy the busiest engine is: its sequences over those that may run; above 1 some wait."""
    return round(max((each.num_running + each.num_waiting) / max(each.max_num_seqs, 1) for each in stats), 4)


def as_text(load: float, rate: float, named: Mapping[str, float]) -> str:
    """The header's value in the text format; `rate` is in requests per second."""
    metrics = [f"named_metrics.{name}={value:g}" for name, value in named.items()]
    return ", ".join([f"TEXT application_utilization={load:g}", f"rps_fractional={rate:.4g}", *metrics])


def as_json(load: float, rate: float, named: Mapping[str, float]) -> str:
    """The header's value as JSON; `rate` is in requests per second."""
    report: dict[str, Any] = {"application_utilization": load, "rps_fractional": round(rate, 4)}
    return f"JSON {json.dumps(report | ({'named_metrics': named} if named else {}))}"
