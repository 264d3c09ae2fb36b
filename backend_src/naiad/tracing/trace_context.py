"""The trace that a request belongs to, as W3C's Trace Context has it in `traceparent` and `tracestate`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_VERSION, _NO_VERSION = "00", "ff"
_MAX_PARENT = 200
# The flag of `traceparent`.
_SAMPLED = 1
_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_MEMBERS = 32
# So much has to be passed on; what is longer may be dropped.
_MAX_STATE = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers, valid; empty: there is none.

    Attributes:
        parent: `traceparent`.
        state: `tracestate`.
    """

    parent: str = ""
    state: str = ""

    @property
    def trace_id(self) -> str:
        """The id of the trace."""
        return self.parent[3:35]

    @property
    def span_id(self) -> str:
        """The id of the span that caused the request."""
        return self.parent[36:52]

    @property
    def is_sampled(self) -> bool:
        """Whether whoever sent the request may record the trace, and so its spans are wanted."""
        return bool(int(self.parent[53:55] or "0", 16) & _SAMPLED)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that there are."""
        named = {"traceparent": self.parent, "tracestate": self.state}
        return {name: value for name, value in named.items() if value}


NO_TRACE = TraceContext()


def read_trace_context(parents: Sequence[str], states: Sequence[str]) -> TraceContext:
    """Read the headers of a request, however often each of them was sent.

    As the standard demands, what is not valid counts as not sent: a request never fails for its trace.
    """
    if len(parents) != 1 or not _is_parent(parents[0].strip()):
        return NO_TRACE
    members = [member.strip() for member in ",".join(states).split(",")]
    members = [member for member in members if member]
    state = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    is_valid = (
        len(state) <= _MAX_STATE
        and len(keys) == len(members) <= _MAX_MEMBERS
        and all(_MEMBER.fullmatch(member) for member in members)
    )
    return TraceContext(parents[0].strip(), state if is_valid else "")


def _is_parent(text: str) -> bool:
    found = _PARENT.fullmatch(text) if len(text) <= _MAX_PARENT else None
    if found is None:
        return False
    version, trace, parent, more = found.groups()
    is_known = version != _NO_VERSION and not (version == _VERSION and more)
    return is_known and bool(trace.strip("0")) and bool(parent.strip("0"))
