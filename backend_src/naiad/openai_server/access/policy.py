"""Which routes need which role, and which addresses need keys."""

from __future__ import annotations

import ipaddress
from typing import Literal

from naiad.openai_server.access.key_file import Role

Need = Role | Literal["nothing"]

# A route's path as it is registered → what a request for it needs. A request that has no route needs a key:
# without one nobody learns which routes there are.
_NEEDS: dict[str, Need] = {
    "/": "nothing",
    "/health": "nothing",
    "/health/ready": "nothing",
    "/page": "nothing",
    "/health/deep": "operator",
    "/metrics": "operator",
}
_PAGE = "/page/"


def need_of(route: str | None, *, metrics_open: bool) -> Need:
    """What a request for this route needs.

    Args:
        route: the path of the route that will answer, as it is registered; the path that was sent does not
            matter. None: there is none, or not for the request's method.
        metrics_open: whether the metrics need nothing.
    """
    if route is None:
        return "user"
    if route.startswith(_PAGE) or (route == "/metrics" and metrics_open):
        return "nothing"
    return _NEEDS.get(route, "user")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
