"""Which HTTP requests pass. What is not in this table is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from naiad.gate.refusal import RefusedError
from naiad.gate.request_head import RequestHead

# none: there may be no body; json: any object; json or none: that, or no body; infer: a request of the
# inference protocol.
BodyKind = Literal["none", "json", "json or none", "infer"]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_MODEL = rf"/v2/models/{_NAME}(?:/versions/[0-9]{{1,10}})?"


@dataclass(frozen=True, slots=True)
class Route:
    """A kind of request that passes.

    Attributes:
        method: its method.
        path: its path, as a regular expression.
        body: what its body is.
    """

    method: str
    path: str
    body: BodyKind = "none"


INFERENCE = (
    Route("GET", "/v2"),
    Route("GET", "/v2/health/live"),
    Route("GET", "/v2/health/ready"),
    Route("GET", "/v2/models/stats"),
    Route("GET", _MODEL),
    Route("GET", f"{_MODEL}/(?:ready|config|stats)"),
    Route("POST", f"{_MODEL}/infer", "infer"),
    Route("POST", f"{_MODEL}/generate", "json"),
    Route("POST", f"{_MODEL}/generate_stream", "json"),
)
MODEL_CONTROL = (
    Route("POST", "/v2/repository/index", "json or none"),
    Route("POST", f"/v2/repository/models/{_NAME}/(?:load|unload)", "json or none"),
)
METRICS = (Route("GET", "/metrics"),)
# What Triton has, and whoever can reach the gate does not need to have.
_CLOSED = {
    re.compile(r"/v2/(?:system|cuda)sharedmemory.*"): "shared memory",
    re.compile(r"/v2/(?:models/[^/]*/)?trace/setting.*"): "settings of traces",
    re.compile(r"/v2/logging.*"): "settings of the log",
}
_REPOSITORY = re.compile(r"/v2/repository.*")


class RouteTable:
    """The routes of a port."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """Set up."""
        self._routes = [(re.compile(route.path), route) for route in routes]
        can_open = INFERENCE[0] in routes and MODEL_CONTROL[0] not in routes
        control = "model control (--model-control-mode explicit opens it)" if can_open else "this path"
        self._closed = {**_CLOSED, _REPOSITORY: control}

    def find(self, head: RequestHead) -> Route:
        """Return the route of a request.

        Raises:
            RefusedError: it has none.
        """
        found = [route for pattern, route in self._routes if pattern.fullmatch(head.target)]
        for route in found:
            if route.method == head.method:
                return route
        if found:
            allowed = ", ".join(route.method for route in found)
            raise RefusedError(
                405, f"{head.method} {_shown(head)}: expected {allowed}", f"Allow: {allowed}\r\n"
            )
        for pattern, name in self._closed.items():
            if pattern.fullmatch(head.target):
                raise RefusedError(403, f"{_shown(head)}: the gate does not let through {name}")
        raise RefusedError(404, f"{head.method} {_shown(head)}: there is no such route")


def _shown(head: RequestHead) -> str:
    return head.target[:200]
