"""The names under which a server may be asked, so that no page of another site can ask it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

_HOST = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


class AllowedHosts:
    """Addresses, localhost, and further names.

    A page can have its own name resolve to this machine's address; then its requests are sent here, with that
    name as their Host.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Take the further names."""
        self._names = {"localhost", *(name.lower() for name in names)}

    def refused_name(self, header: str) -> str | None:
        """Return the name in a Host header that is not allowed, as a message may show it; None: it is."""
        name = _name_of(header)
        return None if name in self._names or _is_address(name) else (name or header)[:80]


def _name_of(header: str) -> str:
    """The name of a Host header, without its port; empty if it is malformed."""
    found = _HOST.fullmatch(header.strip().lower())
    return "" if found is None else found["six"] or found["name"]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
