"""A request of the OpenAI server as far as the readers of its body see it."""

from __future__ import annotations

import json
from typing import Any

from multidict import CIMultiDict


class SentBody(dict[str, Any]):
    """A request with this body and without headers."""

    headers: CIMultiDict[str] = CIMultiDict()
    client_max_size = 1 << 20

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self._raw = json.dumps(body).encode()
        self._rest = self._raw
        self.content = self

    async def readany(self) -> bytes:
        """The whole body; then nothing, until the next reader comes."""
        part, self._rest = self._rest, self._raw if not self._rest else b""
        return part
