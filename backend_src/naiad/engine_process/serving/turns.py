"""Threads that do the jobs of many tenants, one of each in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Turns(Generic[_Result]):
    """Begins jobs in threads: those of one tenant in order, and of each tenant one in turn."""

    def __init__(self, num_threads: int, name: str, initializer: Callable[[], None]) -> None:
        """Start without threads; see `ThreadPoolExecutor`."""
        self._pool = ThreadPoolExecutor(num_threads, name, initializer=initializer)
        self._lock = threading.Lock()
        # Each tenant's jobs; the first tenant's turn is next.
        self._jobs: dict[str, deque[tuple[Future[_Result], Callable[[], _Result]]]] = {}

    def submit(self, tenant: str, job: Callable[[], _Result]) -> Future[_Result]:
        """Do a job when it is the tenant's turn."""
        future: Future[_Result] = Future()
        with self._lock:
            self._jobs.setdefault(tenant, deque()).append((future, job))
        self._pool.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            tenant, jobs = next(iter(self._jobs.items()))
            future, job = jobs.popleft()
            del self._jobs[tenant]
            if jobs:
                self._jobs[tenant] = jobs
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 — whoever waits for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)
