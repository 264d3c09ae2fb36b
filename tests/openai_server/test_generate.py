"""What a request for text costs its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.sent_body import SentBody
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server import generate
from naiad.openai_server.access.caller import Caller
from naiad.openai_server.access.key_file import Limits, new_key
from naiad.openai_server.access.rate_limits import Meter
from naiad.openai_server.api.reading import RequestReader
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.generate import GenerateRoutes
from naiad.openai_server.streams import StreamWatch
from naiad.tokenization import Tokenizer


class BusyModel:
    """A model to whose engine no request gets."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self.has_read = asyncio.Event()

    async def loaded(self) -> Any:
        return SimpleNamespace()

    async def begin(self, _loaded: Any, read: Callable[[RequestReader], Any]) -> Any:
        await asyncio.to_thread(read, self._reader)
        self.has_read.set()
        await asyncio.Event().wait()


@pytest.fixture
def reader(tmp_path: Path) -> RequestReader:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, byte_level_tokenizer()))
    limits = ModelLimits(max_model_len=64, vocab_size=400, eos_token_ids=(1,), exclude_input_in_output=True)
    return RequestReader(PromptEncoder(tokenizer, 64, 400), limits)


def test_who_leaves_before_the_engine_has_the_request_pays_for_its_prompt(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = new_key("name", "tenant", "user")
    meter = Meter(Limits(tokens_per_minute=100), lambda: 0.0)
    monkeypatch.setattr(
        generate, "caller_of", lambda _request: Caller(key, meter, b"secret", lambda _key: True)
    )

    async def leave() -> None:
        model = BusyModel(reader)
        models: Any = SimpleNamespace(get=lambda _name: model)
        bodies = BodyReader(ThreadPoolExecutor(1), is_lenient=False)
        request: Any = SentBody({"model": "m", "prompt": [5] * 60})
        answer = asyncio.create_task(GenerateRoutes(models, bodies, StreamWatch(60, 60)).completion(request))
        has_read = asyncio.create_task(model.has_read.wait())
        await asyncio.wait([answer, has_read], return_when=asyncio.FIRST_COMPLETED)
        assert has_read.done(), answer.exception()
        answer.cancel()
        await asyncio.wait([answer])

    asyncio.run(leave())
    assert meter.headers()["x-ratelimit-remaining-tokens"] == "40"
