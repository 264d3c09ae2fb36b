"""A client that leaves while its prompt waits for a thread, or while a thread reads it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from naiad.errors import InvalidRequestError
from naiad.openai_server.engines.local_model import LocalModel


def with_model(
    directory: Path, test: Callable[[LocalModel, ThreadPoolExecutor], Coroutine[Any, Any, None]]
) -> None:
    """Run a test with a model without an engine and a pool of one thread."""

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            model = LocalModel(directory, "llm", loop, pool, Mock())
            try:
                await test(model, pool)
            finally:
                await loop.run_in_executor(None, model.close)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_has_not_begun_is_never_begun(tmp_path: Path) -> None:
    read = Mock()
    is_free = threading.Event()

    async def test(model: LocalModel, pool: ThreadPoolExecutor) -> None:
        pool.submit(is_free.wait)
        asking = asyncio.create_task(model.begin(Mock(), read))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        is_free.set()
        await asyncio.get_running_loop().run_in_executor(pool, int)

    with_model(tmp_path, test)
    assert read.call_count == 0


def test_a_request_lasts_as_long_as_the_work_on_it(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def read(_reader: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        raise InvalidRequestError("the prompt is not valid")

    async def test(model: LocalModel, _pool: ThreadPoolExecutor) -> None:
        asking = asyncio.create_task(model.begin(Mock(), read))
        await asyncio.to_thread(has_begun.wait)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=0.1)
        assert not done
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with_model(tmp_path, test)
