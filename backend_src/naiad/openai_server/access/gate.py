"""Lets requests in by their keys."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from aiohttp import web

from naiad.errors import StartupError
from naiad.openai_server.access.caller import Caller
from naiad.openai_server.access.key_file import Key, digest_of, read_key_file, write_key_file
from naiad.openai_server.access.policy import need_of
from naiad.openai_server.access.rate_limits import Clock, Meter
from naiad.openai_server.api.errors import APIError

logger = logging.getLogger(__name__)

_CALLER = web.RequestKey("caller", Caller)
_SECRET_BYTES = 32
_BEARER = "bearer"
_KEY_HEADERS = ("Authorization", "x-api-key")


class Gate:
    """The keys of a file, and what each has used. Belongs to the event loop."""

    def __init__(
        self,
        path: Path,
        *,
        metrics_open: bool = False,
        clock: Clock = time.monotonic,
        last_good: Path | None = None,
    ) -> None:
        """Read the file.

        Args:
            path: the file of keys.
            metrics_open: whether the metrics need no key.
            clock: the time in seconds.
            last_good: a file in a private directory, for what was read last. A process that is started again
                takes that if the file of keys is wrong then. None: nothing is kept.

        Raises:
            StartupError: the file is wrong, and nothing was kept; the message says how.
        """
        self.metrics_open = metrics_open
        self._path = path
        self._clock = clock
        # A restart draws another one: it costs what was cached, and no salt can be found out.
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._meters: dict[str, Meter] = {}
        self._keys: Sequence[Key] = ()
        self._last_good = last_good
        try:
            self.reload()
        except StartupError as error:
            if last_good is None or not last_good.exists():
                raise
            logger.error("the old keys stay: %s", error)
            self._take(read_key_file(last_good))

    def reload(self) -> int:
        """Read the file again; return the number of keys. Requests under way go on.

        A key that keeps its name keeps what it has used.

        Raises:
            StartupError: the file is wrong; the old keys stay.
        """
        keys = read_key_file(self._path)
        self._take(keys)
        if self._last_good is not None:
            _keep(self._last_good, keys)
        return len(keys)

    def _take(self, keys: Sequence[Key]) -> None:
        meters = {key.name: self._meters.get(key.name) or Meter(key.limits, self._clock) for key in keys}
        for key in keys:
            meters[key.name].limit(key.limits)
        self._keys, self._meters = keys, meters

    def identify(self, request: web.Request) -> None:
        """Check the key of a request, of which only the headers have been read.

        Raises:
            APIError: the request needs a key, and has none, or one that is not known or lacks the role.
        """
        resource = request.match_info.route.resource
        need = need_of(None if resource is None else resource.canonical, metrics_open=self.metrics_open)
        presented = _presented(request)
        key = None if presented is None else self.find(presented)
        if key is not None:
            request[_CALLER] = Caller(key, self._meters[key.name], self._secret, self._knows)
        if need == "nothing":
            return
        if key is None:
            raise _no_key(request, is_missing=presented is None)
        if need == "operator" and key.role != "operator":
            message = f"The key {key.name} has the role {key.role}: this route needs the role operator."
            raise APIError(403, message, code="insufficient_permissions")

    def _knows(self, key: Key) -> bool:
        return key in self._keys

    def find(self, presented: str) -> Key | None:
        """Return the entry of a key, in a time that does not depend on how near an entry it comes."""
        digest = digest_of(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def _keep(path: Path, keys: Sequence[Key]) -> None:
    """Keep keys for a restart, or none: older ones may have been taken back."""
    try:
        write_key_file(path, keys)
    except OSError as error:
        logger.warning("a restart needs the file of keys, as they can not be kept: %s", error)
        with suppress(OSError):
            path.unlink()


def caller_of(request: web.Request) -> Caller | None:
    """Who sent a request; None: the server has no keys, or the request has none and needs none."""
    return request.get(_CALLER)


def metered(request: web.Request) -> AbstractContextManager[None]:
    """Count a request that asks for work while the context lasts.

    Raises:
        APIError: the key's limits are reached.
    """
    caller = caller_of(request)
    has_route = request.match_info.http_exception is None
    return caller.meter.running() if caller and request.method == "POST" and has_route else nullcontext()


def _presented(request: web.Request) -> str | None:
    """The key that a request has; OpenAI's header goes before Anthropic's."""
    sent = request.headers.getall("Authorization", [])
    scheme, _, key = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
    if scheme.lower() == _BEARER:
        return key.strip()
    others = request.headers.getall("x-api-key", [])
    return others[0].strip() if len(others) == 1 else None


def _no_key(request: web.Request, *, is_missing: bool) -> APIError:
    message = "The API key is not known."
    if is_missing:
        several = [name for name in _KEY_HEADERS if len(request.headers.getall(name, [])) > 1]
        found = f"The header {several[0]} was sent more than once" if several else "No API key was sent"
        message = f"{found}: expected the header Authorization: Bearer KEY, or x-api-key: KEY."
    return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
