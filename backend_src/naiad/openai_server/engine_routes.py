"""The routes that tell what an engine is doing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

from naiad.errors import EngineAwayError
from naiad.openai_server.access.gate import caller_of
from naiad.openai_server.api.answers import encode
from naiad.openai_server.api.engine_view import EngineNotice, EngineView, view_of
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.engine_watch import EngineWatch, News
from naiad.openai_server.engines.interface import Models
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.openai_server.route import Route
from naiad.openai_server.streams import EventStream, StreamWatch

# Of `/engine/events`, for each key, or of all clients if there are no keys. The page opens one.
MAX_EVENT_STREAMS = 32
_BUSY_RETRY_S = 1


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks.

    Attributes:
        tenant: the tenant of its key.
        is_operator: whether it may see the rows of all tenants.
    """

    tenant: str
    is_operator: bool


@dataclass(frozen=True, slots=True)
class EngineRoutes:
    """Handlers of requests about engines.

    Attributes:
        models: the models to choose from.
        watch: follows the engines that somebody watches.
        streams: watches streams.
        num_open: the name of a key → its streams of events.
    """

    models: Models
    watch: EngineWatch
    streams: StreamWatch
    num_open: Counter[str] = field(default_factory=Counter)

    def routes(self) -> list[Route]:
        """The routes that these handlers answer."""
        query = {"model": "A model's name; it may be left out where there is only one."}
        return [
            Route(
                method="GET",
                path="/engine/snapshot",
                handler=self.snapshot,
                summary="Tells what a model's engine is doing; never prompts or texts.",
                query=query,
                answer=EngineView,
            ),
            Route(
                method="GET",
                path="/engine/events",
                handler=self.events,
                summary=(
                    "Tells twice a second what a model's engine is doing, as events with the name snapshot; "
                    "events with the names away, restarted and gone have the fields model and message."
                ),
                query=query,
                event=EngineView,
            ),
        ]

    async def snapshot(self, request: web.Request) -> web.Response:
        """Answer `GET /engine/snapshot?model=NAME` with an `EngineView`."""
        name = self._model_name(request)
        seen = await self.models.get(name).snapshot()
        body = encode(_view(seen, name, viewer_of(request)))
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /engine/events?model=NAME` with server-sent events, until the client leaves.

        `snapshot` comes twice a second with an `EngineView`; the other events have an `EngineNotice`.
        `away`: the engine does not serve now. `restarted`: the next snapshots are of another engine of the
        model. `gone`: the model was unloaded, which ends the stream.
        """
        name, viewer = self._model_name(request), viewer_of(request)
        with contextlib.suppress(EngineAwayError):
            self.models.get(name)
        if request.method == "HEAD":
            return web.Response(content_type="text/event-stream")
        with self._counted(request):
            return await self._follow(request, name, viewer)

    async def _follow(self, request: web.Request, name: str, viewer: Viewer) -> web.StreamResponse:
        watcher, caller = self.watch.enter(name), caller_of(request)
        stream = EventStream(request, watcher.nudge)
        self.streams.streams.add(stream)
        try:
            # The client may be gone; then nobody is left to be told.
            with contextlib.suppress(ConnectionResetError):
                await stream.open()
                is_over = False
                while not is_over:
                    news = await watcher.next()
                    if caller is not None and not caller.is_known:
                        # Its key was taken back, or may see less now.
                        break
                    if not news:
                        await stream.comment()
                    for each in news:
                        await stream.write(_event(each, name, viewer))
                        is_over |= each.name == "gone"
        finally:
            self.streams.streams.discard(stream)
            self.watch.leave(name, watcher)
        return stream.response

    @contextlib.contextmanager
    def _counted(self, request: web.Request) -> Iterator[None]:
        """Count a stream of events while the context lasts.

        They have a bound of their own, because a key that may send one request should be able to watch it.

        Raises:
            APIError: there are too many.
        """
        caller = caller_of(request)
        name = "" if caller is None else caller.key.name
        if self.num_open[name] >= MAX_EVENT_STREAMS:
            whose = "" if caller is None else f" with the key {name}"
            message = f"Too many streams of /engine/events{whose}: at most {MAX_EVENT_STREAMS} are allowed."
            headers = {"Retry-After": str(_BUSY_RETRY_S)}
            raise APIError(429, message, code="rate_limit_exceeded", headers=headers)
        self.num_open[name] += 1
        try:
            yield
        finally:
            self.num_open[name] -= 1

    def _model_name(self, request: web.Request) -> str:
        """The name that a request asks for; without one the only model's.

        Raises:
            APIError: the query is not valid, or there is no such model.
        """
        for name in request.query:
            if name != "model":
                message = f"The query has the unknown name {name[:80]!r}: expected model."
                raise APIError(400, message, param=name[:80])
        if "model" in request.query:
            return request.query["model"]
        names = list(self.models.by_name())
        if len(names) != 1:
            message = (
                f"model is missing: expected one of {', '.join(names)}." if names else "No model serves now."
            )
            raise APIError(400 if names else 503, message, param="model")
        return names[0]


def viewer_of(request: web.Request) -> Viewer:
    """Who sent a request. Without keys everybody is an operator."""
    caller = caller_of(request)
    if caller is None:
        return Viewer(tenant="", is_operator=True)
    return Viewer(caller.key.tenant, caller.key.role == "operator")


def _view(seen: NamedSnapshot, model: str, viewer: Viewer) -> EngineView:
    return view_of(
        seen.snapshot,
        seen.info,
        model,
        seen.request_ids,
        tenant=viewer.tenant,
        is_operator=viewer.is_operator,
    )


def _event(news: News, model: str, viewer: Viewer) -> bytes:
    data: EngineView | EngineNotice | None = news.notice
    if news.seen is not None:
        data = _view(news.seen, model, viewer)
    assert data is not None
    return b"event: %b\ndata: %b\n\n" % (news.name.encode(), encode(data))
