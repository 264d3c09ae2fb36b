"""Threads that do the jobs of many tenants, one of each in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class TenantTurns(Generic[_Result]):
    """Begins jobs in threads: those of one tenant in order, and of each tenant one in turn."""

    def __init__(self, num_threads: int, name: str, initializer: Callable[[], None]) -> None:
        """Start without threads; see `ThreadPoolExecutor`."""
        self._pool = ThreadPoolExecutor(num_threads, name, initializer=initializer)
        self._num_free = num_threads
        self._lock = threading.Lock()
        # Each tenant's jobs; the first tenant's turn is next.
        self._jobs: dict[str, deque[tuple[Future[_Result], Callable[[], _Result]]]] = {}

    def submit(self, tenant: str, job: Callable[[], _Result]) -> Future[_Result]:
        """Do a job when it is the tenant's turn; a future that is cancelled before costs no thread."""
        future: Future[_Result] = Future()
        with self._lock:
            self._jobs.setdefault(tenant, deque()).append((future, job))
        self._begin()
        return future

    def _begin(self) -> None:
        """Begin the next job if there is one and a thread is free."""
        while (taken := self._take()) is not None:
            future, job = taken
            if future.set_running_or_notify_cancel():
                try:
                    self._pool.submit(job).add_done_callback(partial(self._end, future))
                except RuntimeError as error:  # the pool is broken or the interpreter ends
                    future.set_exception(error)
                else:
                    return
            self._release()

    def _take(self) -> tuple[Future[_Result], Callable[[], _Result]] | None:
        with self._lock:
            if not self._num_free or not self._jobs:
                return None
            self._num_free -= 1
            tenant, jobs = next(iter(self._jobs.items()))
            taken = jobs.popleft()
            del self._jobs[tenant]
            if jobs:
                self._jobs[tenant] = jobs
            return taken

    def _release(self) -> None:
        with self._lock:
            self._num_free += 1

    def _end(self, future: Future[_Result], done: Future[_Result]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)
        self._release()
        self._begin()
