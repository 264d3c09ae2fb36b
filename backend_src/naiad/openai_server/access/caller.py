"""Whose request it is: the tenant, its salt and its priority come from the key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from naiad.openai_server.access.key_file import LOWEST_PRIORITY, Key
from naiad.openai_server.access.rate_limits import Meter
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration


@dataclass(frozen=True, slots=True)
class Caller:
    """A key whose owner sent a request.

    Attributes:
        key: its entry.
        meter: what it has used.
    """

    key: Key
    meter: Meter
    _secret: bytes = field(repr=False)
    _knows: Callable[[Key], bool] = field(repr=False)

    @property
    def is_known(self) -> bool:
        """Whether the file of keys still has this entry, as it was."""
        return self._knows(self.key)

    def own(self, asked: AskedGeneration, priority: int | None) -> AskedGeneration:
        """Return the request as the tenant's: with its share, its salt and a priority that the key allows.

        Args:
            asked: the request.
            priority: what the body asks for; None: the key's highest.

        Raises:
            APIError: the priority is higher than the key's highest.
        """
        highest = self.key.limits.highest_priority
        # The smallest number is the highest priority. None is below that of an ordinary request, so a request
        # never gets ahead of other tenants' requests by its priority.
        if priority is not None and priority < highest:
            expected = f"{highest} … {LOWEST_PRIORITY} with the key {self.key.name}"
            raise APIError(400, f"priority = {priority}: expected {expected}.", param="priority")
        rows = [
            replace(
                row,
                cache_salt=self.salt(row.cache_salt),
                tenant=self.key.tenant,
                params=msgspec.structs.replace(
                    row.params, priority=highest if priority is None else priority
                ),
            )
            for row in asked.request.rows
        ]
        return replace(asked, request=replace(asked.request, rows=rows))

    def salt(self, sent: str) -> str:
        """The engine's salt for a client's: nobody else's, and nobody can name it."""
        words = f"{self.key.tenant}\0{sent}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, words, hashlib.sha256).hexdigest()
