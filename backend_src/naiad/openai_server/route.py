"""The table of routes: what the server answers, and what `/openapi.json` says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON = "application/json"
# A client with this header `Expect` sends its body when it is told to.
CONTINUE = "100-continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. Types are msgspec structs, or any other type that msgspec can describe.

    Attributes:
        method: HTTP method; GET also answers HEAD.
        path: its path, as aiohttp writes it: a part may be `{name}` or `{name:regular expression}`.
        handler: answers its requests.
        summary: what it does, in one sentence.
        body: type of the request's body; None: it has none.
        example: a body that is valid.
        query: name of a query parameter → what it means; all of them are optional strings.
        answer: type of the JSON of a success; None: the answer is empty, or not JSON.
        event: type of the JSON in each event, if the request asks for a stream; None: it can not.
        media_type: of an answer that is not JSON.
        failure: type of the JSON of failures; None: OpenAI's error body.
        failures: status → type of the JSON, where it is not that of every other failure.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    example: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    answer: Any = None
    event: Any = None
    media_type: str = ""
    failure: Any = None
    failures: Mapping[int, Any] = field(default_factory=dict)


# When a request came, on the monotonic clock.
BEGAN_S = web.RequestKey("began_s", float)
# Set when an answer could not be written to its end, because its client is gone.
IS_GONE = web.RequestKey("is_gone", bool)
# The routes of an application.
ROUTES: web.AppKey[list[Route]] = web.AppKey("routes", list)


def add_routes(app: web.Application, routes: Iterable[Route]) -> None:
    """Have the application answer these routes; `app[ROUTES]` is then their table."""
    app[ROUTES] = list(routes)
    for route in app[ROUTES]:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler, expect_handler=_say_nothing)
        else:
            app.router.add_route(route.method, route.path, route.handler, expect_handler=_say_nothing)


async def _say_nothing(_request: web.Request) -> None:
    """Leave it to the reader of bodies to ask for one: until then the request may be refused."""
