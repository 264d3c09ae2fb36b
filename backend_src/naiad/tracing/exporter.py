"""Sends spans to a collector by OTLP/HTTP, from a thread of its own."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from naiad.errors import ConfigError
from naiad.frontend.request_families import DROPPED, SENT
from naiad.tracing.span import Span, Value, encode_spans

# Spans that may wait; one of them takes about a kilobyte.
MAX_WAITING = 8192
MAX_BATCH = 512
# The models' parameter with the collector's address.
OTLP_ENDPOINT = "otlp_endpoint"
COLLECT_S = 0.5
_TIMEOUT_S = 5.0
_CLOSE_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# The statuses by which a collector says that the same spans may be sent again later.
_AGAIN = frozenset({429, 502, 503, 504})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collector:
    """The address of a collector.

    Attributes:
        url: where spans are posted.
        is_encrypted: whether by HTTPS.
        host, port: the server; port None: the scheme's own.
        path: of the resource.
    """

    url: str
    is_encrypted: bool
    host: str
    port: int | None
    path: str

    @classmethod
    def parse(cls, key: str, endpoint: str) -> Collector:
        """Read an endpoint as OpenTelemetry has it; spans go to `v1/traces` below it.

        Raises:
            ConfigError: it is no such address; the message names `key`.
        """
        try:
            parts = urlsplit(endpoint)
            port = parts.port
        except ValueError:
            raise _bad(key, endpoint) from None
        is_plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
        has_more = parts.query or parts.fragment or parts.username is not None
        if parts.scheme not in ("http", "https") or not parts.hostname or has_more or not is_plain:
            raise _bad(key, endpoint)
        path = f"{parts.path.rstrip('/')}/v1/traces"
        return cls(
            f"{parts.scheme}://{parts.netloc}{path}", parts.scheme == "https", parts.hostname, port, path
        )

    def post(self, body: bytes) -> int:
        """Send spans; return the status.

        Raises:
            OSError, http.client.HTTPException: the collector is not reached, or it does not speak HTTP.
        """
        kind = http.client.HTTPSConnection if self.is_encrypted else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            # What it says beside the status may be long, and is of no use.
            with connection.getresponse() as answer:
                return answer.status
        finally:
            connection.close()


class SpanExporter:
    """Keeps a bounded number of spans and sends them. Any thread may call `add`, which never waits.

    Attributes:
        family, description: of the metric that counts spans.
        num_sent: spans that the collector has taken.
        num_dropped: spans that were dropped: too many waited, or the collector refused them.
    """

    family = "naiad_trace_spans_total"
    description = "Spans of requests that the collector has taken, and those that were dropped"

    def __init__(
        self, collector: Collector, resource: Mapping[str, Value], collect_s: float = COLLECT_S
    ) -> None:
        """Start the thread.

        Args:
            collector: takes the spans.
            resource: attributes of this process.
            collect_s: how long the spans of other requests are waited for.
        """
        self.num_sent = 0
        self.num_dropped = 0
        self._collector = collector
        self._resource = resource
        self._waiting: deque[Span] = deque()
        self._has_news = threading.Event()
        self._stopping = threading.Event()
        self._collect_s = collect_s
        self._pause_s = 0.0
        self._lock = threading.Lock()  # guards the number of dropped spans
        self._thread = threading.Thread(target=self._run, name="naiad-spans", daemon=True)
        self._thread.start()

    def add(self, spans: list[Span]) -> None:
        """Have spans sent; if too many wait, they are dropped."""
        if len(self._waiting) + len(spans) > MAX_WAITING:
            self._drop(len(spans))
            return
        self._waiting.extend(spans)
        if not self._has_news.is_set():
            self._has_news.set()

    def counts(self) -> dict[str, int]:
        """How many spans were sent and dropped, by the metric's names for it."""
        return {SENT: self.num_sent, DROPPED: self.num_dropped}

    def close(self) -> None:
        """Send what waits, if the collector takes it now, and end the thread."""
        self._stopping.set()
        self._has_news.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._has_news.wait()
            # The spans of some requests travel together.
            self._stopping.wait(max(self._collect_s, self._pause_s))
            self._has_news.clear()
            while self._waiting and self._send_some():
                pass
            if self._waiting:
                self._has_news.set()

    def _send_some(self) -> bool:
        """Send a batch; return whether to go on."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        try:
            status = self._collector.post(encode_spans(self._resource, batch))
            problem = f"it answers with status {status}"
        except (OSError, http.client.HTTPException) as error:
            status, problem = 503, str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001 — only these spans are lost
            status, problem = 0, f"{type(error).__name__}: {error}"
        if 200 <= status < 300:
            self.num_sent += len(batch)
            if self._pause_s:
                logger.info("the collector %s takes spans again", self._collector.url)
            self._pause_s = 0.0
            return True
        if status in _AGAIN:
            self._waiting.extendleft(reversed(batch))
        else:
            self._drop(len(batch))
        self._warn(problem)
        return False

    def _warn(self, problem: str) -> None:
        """Wait longer after each failure in a row; only the first of them has a line in the log."""
        if not self._pause_s:
            logger.warning("the collector %s does not take spans: %s", self._collector.url, problem)
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _drop(self, num_spans: int) -> None:
        with self._lock:
            self.num_dropped += num_spans


def monotonic_to_unix_ns() -> int:
    """What to add to a time of the monotonic clock, in nanoseconds, to get Unix time."""
    return time.time_ns() - time.monotonic_ns()


def _bad(key: str, endpoint: str) -> ConfigError:
    return ConfigError(
        key, endpoint, "the address of a collector's OTLP/HTTP port, such as http://localhost:4318"
    )
