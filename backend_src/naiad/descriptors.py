"""The limit of a process' file descriptors."""

from __future__ import annotations

import resource

# Where there is no limit; memory is one.
_ANY = 1 << 20


def raise_descriptor_limit() -> int:
    """Raise this process' soft limit of file descriptors to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
