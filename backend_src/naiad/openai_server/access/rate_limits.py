"""How much a key has used: token buckets for requests and tokens, and the requests under way.

A bucket holds at most a minute's worth and fills steadily. A request needs one whole request and at least
one token in its buckets. Its prompt's tokens are taken when they are known and its new tokens when it ends.
If that is more than the bucket holds, the rest is a debt, and the key's next request waits until it is paid.
So no prompt is too large for a key, and on average a key gets its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from naiad.openai_server.access.key_file import Limits
from naiad.openai_server.api.errors import APIError

_MINUTE_S = 60.0
# When a request that is under way will end is not known.
_BUSY_RETRY_S = 1

Clock = Callable[[], float]


class Bucket:
    """A token bucket: holds at most a minute's worth, and fills steadily."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        """Start full."""
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen_s = clock()

    @property
    def level(self) -> float:
        """What it holds; negative: a debt."""
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        return self._level

    def take(self, amount: float) -> None:
        """Take this much, whatever it holds."""
        self._level = self.level - amount

    def wait_s(self, level: float) -> float:
        """Seconds until it holds this much."""
        # A moment less than nothing is due to rounding.
        return max(0.0, (level - self.level) / self._rate - 1e-9)

    def resized(self, per_minute: int) -> Bucket:
        """The bucket with another size, at most as full as this one."""
        if per_minute == self.per_minute:
            return self
        made = Bucket(per_minute, self._clock)
        made.take(max(0.0, per_minute - self.level))
        return made

    @property
    def _rate(self) -> float:
        return self.per_minute / _MINUTE_S


class Meter:
    """What one key uses. Belongs to the event loop."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        """Start with nothing used."""
        self._clock = clock
        self._max_running: int | None = None
        self._buckets: dict[str, Bucket] = {}
        self.num_running = 0
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Set other limits; what was used stays used."""
        self._max_running = limits.concurrent_requests
        sizes = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        old = self._buckets
        self._buckets = {
            kind: old[kind].resized(size) if kind in old else Bucket(size, self._clock)
            for kind, size in sizes.items()
            if size is not None
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request, which is under way until the context ends.

        Raises:
            APIError: a limit is reached; the request has not been counted.
        """
        self._check()
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a request."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens)

    def headers(self) -> dict[str, str]:
        """The headers that tell a client its limits; none of a key without them."""
        named = {}
        for kind, bucket in self._buckets.items():
            named[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            named[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level + 1e-9)))
            named[f"x-ratelimit-reset-{kind}"] = _duration(bucket.wait_s(bucket.per_minute))
        return named

    def _check(self) -> None:
        for kind, bucket in self._buckets.items():
            wait_s = bucket.wait_s(1)
            if wait_s > 0:
                raise _refusal(f"{bucket.per_minute} {kind} a minute", math.ceil(wait_s))
        if self._max_running is not None and self.num_running >= self._max_running:
            raise _refusal(f"{self._max_running} requests at the same time", _BUSY_RETRY_S)


def _refusal(limit: str, retry_s: int) -> APIError:
    message = f"Rate limit reached: this key may send {limit}. Try again in {retry_s} s."
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_s)})


def _duration(seconds: float) -> str:
    """A duration as OpenAI's headers have it, such as 20ms, 1.5s or 6m0s; rounded up to milliseconds."""
    total_ms = math.ceil(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    return f"{minutes}m{rest_ms / 1000:g}s" if minutes else f"{rest_ms / 1000:g}s"
