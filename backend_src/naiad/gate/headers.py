"""Which of a client's headers are sent on: those that are known, if they are well-formed."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEY = re.compile(r"[A-Za-z0-9_.-]{16,256}")
# W3C's trace context says that a malformed one does not count.
_PASSED = {
    "naiad-model-control-key": _KEY,
    "triton-grpc-protocol-naiad-model-control-key": _KEY,
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}


def passed_headers(sent: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers, or the metadata, to send on; names are in small letters.

    One that comes several times is a list, which only `tracestate` may be.
    """
    joined: dict[str, str] = {}
    for name, value in sent:
        if name in _PASSED:
            joined[name] = f"{joined[name]},{value}" if name in joined else value
    return tuple((name, value) for name, value in joined.items() if _PASSED[name].fullmatch(value))
