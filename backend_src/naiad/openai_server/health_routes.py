"""The routes that say whether models serve: `/health` at no cost, `/health/deep` by asking them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aiohttp import hdrs, web

from naiad.errors import NaiadError, UnavailableError
from naiad.openai_server.api.answers import DeepHealth, ModelHealth, encode
from naiad.openai_server.api.bodies import CompletionBody, Prompt
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.tally import Tally
from naiad.openai_server.engines.interface import Models
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.openai_server.route import JSON, Route
from naiad.sequence import FinishReason

_MODEL = "model"
_PROMPT = "Hello"
# An engine that is well ends a step sooner.
_PROGRESS_S = 3.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Probe:
    """What an inference has shown.

    Attributes:
        seconds: how long it took.
        ended_s: when it ended, by the monotonic clock.
        error: why no token came; None: one came.
        is_busy: no token came, but the engine makes tokens for others.
    """

    seconds: float
    ended_s: float
    error: str | None
    is_busy: bool = False

    @property
    def status(self) -> Literal["ok", "busy", "failed"]:
        """The word for it."""
        if self.error is None:
            return "ok"
        return "busy" if self.is_busy else "failed"


class HealthRoutes:
    """Handlers of both routes. Requests for the same model's deep health share one inference."""

    def __init__(self, models: Models, timeout_s: float, cache_s: float) -> None:
        """Set up.

        Args:
            models: the models to ask.
            timeout_s: a model that has made no token by then has failed.
            cache_s: how long an inference's result is the answer to further requests.
        """
        self._models = models
        self._timeout_s = timeout_s
        self._cache_s = cache_s
        self._probes: dict[str, asyncio.Task[_Probe]] = {}
        self._is_stopping = False

    def routes(self) -> list[Route]:
        """The routes that these handlers answer."""
        return [
            Route(
                method="GET",
                path="/health",
                handler=self.health,
                summary="Succeeds while a model serves.",
            ),
            Route(
                method="GET",
                path="/health/ready",
                handler=self.health,
                summary="The same, by the name of Triton's OpenAI frontend.",
            ),
            Route(
                method="GET",
                path="/health/deep",
                handler=self.deep_health,
                summary="Succeeds if every model makes a token, or is busy with others' tokens; "
                "a result is kept for a few seconds.",
                query={_MODEL: "the one model to ask; without it all models are asked"},
                answer=DeepHealth,
                failures={503: DeepHealth},
            ),
        ]

    def announce_stop(self) -> None:
        """Be not ready from now on, and end each connection with its next answer."""
        self._is_stopping = True

    async def prepare(self, _request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Tell a client whose server stops not to send its next request on the same connection."""
        if self._is_stopping:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    async def health(self, _request: web.Request) -> web.Response:
        """Answer `GET /health`: 200 while a model serves and takes requests."""
        if self._is_stopping:
            raise APIError(503, "The server is shutting down.", headers={"Retry-After": "1"})
        if not self._models.by_name():
            raise _nothing_serves()
        return web.Response()

    async def deep_health(self, request: web.Request) -> web.Response:
        """Answer `GET /health/deep`: 200 if each model makes a token, for the probe or for others."""
        unknown = next((name for name in request.query if name != _MODEL), None)
        if unknown is not None:
            message = f"{unknown[:80]}: this parameter is not known: expected {_MODEL}."
            raise APIError(400, message, param=unknown[:80], code="unknown_parameter")
        names = self._asked(request.query.getall(_MODEL, []))
        probes = await asyncio.gather(*map(self._probe, names))
        now_s = time.monotonic()
        answer = DeepHealth(
            models={
                name: ModelHealth(
                    status=probe.status,
                    seconds=round(probe.seconds, 6),
                    age_seconds=round(now_s - probe.ended_s, 6),
                    error=probe.error,
                )
                for name, probe in zip(names, probes, strict=True)
            }
        )
        failed = [
            f"`{name}`: {found.error}" for name, found in answer.models.items() if found.status == "failed"
        ]
        if not failed:
            return web.Response(body=encode(answer), content_type=JSON)
        error = APIError(503, f"No token came from {'; '.join(failed)}.", param=_MODEL)
        answer.error = error.details
        return web.Response(status=503, body=encode(answer), content_type=JSON, headers={"Retry-After": "1"})

    async def close(self) -> None:
        """End the inferences that run."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _asked(self, names: Sequence[str]) -> list[str]:
        """The models to ask.

        Raises:
            APIError: one of these is no model, or there is none at all.
        """
        known = self._models.expected()
        for name in names:
            if name not in known:
                self._models.get(name)
        asked = sorted(set(names)) or known
        if not asked:
            raise _nothing_serves()
        return asked

    async def _probe(self, name: str) -> _Probe:
        """The last inference's result, if it is recent, else that of one that runs or begins now."""
        probe = self._probes.get(name)
        if probe is None or (probe.done() and self._is_over(probe)):
            probe = self._probes[name] = asyncio.create_task(self._infer(name))
        # A client that leaves must not end what others wait for.
        return await asyncio.shield(probe)

    def _is_over(self, probe: asyncio.Task[_Probe]) -> bool:
        """Whether the result of an inference that has ended is not to be given any more."""
        if probe.cancelled() or probe.exception() is not None:
            return True
        return time.monotonic() - probe.result().ended_s >= self._cache_s

    async def _infer(self, name: str) -> _Probe:
        begin_s = time.monotonic()
        error, may_be_busy = None, False
        try:
            await asyncio.wait_for(self._make_token(name), self._timeout_s)
        except asyncio.TimeoutError:
            error, may_be_busy = f"it has made no token in {self._timeout_s:g} s", True
        except (APIError, NaiadError) as problem:
            error = problem.message if isinstance(problem, APIError) else str(problem)
            may_be_busy = isinstance(problem, UnavailableError)
        is_busy = may_be_busy and await self._is_busy(name)
        ended_s = time.monotonic()
        return _Probe(ended_s - begin_s, ended_s, error, is_busy)

    async def _is_busy(self, name: str) -> bool:
        """Whether the engine of a model that had no token for us computes tokens of others."""
        try:
            await asyncio.wait_for(self._progress(name), _PROGRESS_S)
        except (APIError, NaiadError, asyncio.TimeoutError):
            return False
        return True

    async def _progress(self, name: str) -> None:
        """Return once the engine has computed tokens.

        Raises:
            APIError: it can not be asked.
            NaiadError: it is away, or it can not be asked.
        """
        model = self._models.get(name)
        before = _num_tokens(await model.snapshot())
        while _num_tokens(await model.snapshot()) <= before:
            await asyncio.sleep(_LOOK_S)

    async def _make_token(self, name: str) -> None:
        model = self._models.get(name)
        loaded = await model.loaded()
        ids = list(loaded.info.eos_token_ids[:1]) or [0]
        # A server that takes text need not have a text for these ids.
        prompt: Prompt = [ids] if model.has_token_ids else _PROMPT
        body = CompletionBody(model=name, prompt=prompt, max_tokens=1, temperature=0.0)
        asked, generation = await model.begin(
            loaded, lambda reader: reader.completion(body, f"health-{uuid.uuid4().hex}")
        )
        try:
            tally = Tally(asked.request, drops_tokens=asked.drops_tokens)
            while not tally.is_complete:
                for delta in await generation.next():
                    tally.take(delta)
                    if delta.output.finish_reason is FinishReason.TIMEOUT:
                        raise UnavailableError("its deadline passed before it had made a token")
        finally:
            generation.close()


def _num_tokens(taken: NamedSnapshot) -> int:
    stats = taken.snapshot.stats
    return stats.total_prompt_tokens + stats.total_generation_tokens


def _nothing_serves() -> APIError:
    return APIError(503, "No model serves now.", headers={"Retry-After": "1"})
