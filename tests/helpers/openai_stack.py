"""A real engine with the OpenAI server and the `text` model's service around it, without a Triton server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from helpers.openai_requests import tensors_of
from helpers.triton_server_doubles import CountedIds, FakeSender, FakeSource
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.engine_process.runtime_dir import remove_runtime_directory, runtime_directory
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.frontend.request import GenerateRequest
from naiad.openai_server.app import ServerOptions, make_app
from naiad.outputs import EngineStats, RequestOutput
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.responses.text import TextWriter
from naiad.triton_server.service.llm_service import LLMService, RequestShape

MAX_MODEL_LEN = 2048
_PATIENCE_S = 60


class TextService:
    """What the `text` model does with a request, from its tensors to those of its responses."""

    def __init__(self, checkpoint: Path, socket_path: Path, config: EngineConfig) -> None:
        """Start the engine."""
        self._service: LLMService | None = None
        self.engine = EngineClient(config, socket_path, self._take, lambda: None)
        self.engine.start()
        info = self.engine.info
        self.limits = ModelLimits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            exclude_input_in_output=False,
        )
        tokenizer = Tokenizer.from_directory(checkpoint)
        encoder = PromptEncoder(tokenizer, info.max_model_len, info.vocab_size)
        self._reader = TextRequestReader(encoder)
        writer = TextWriter(ChunkTexts(tokenizer.table), accumulates=False)
        shape = RequestShape(read=self._reader.read, build=writer.write)
        self._service = LLMService(self.engine, print, CountedIds(), shape)

    def read(self, fields: dict[str, Any]) -> GenerateRequest:
        """The typed request."""
        request = self._reader.read(FakeSource(tensors_of(fields)), self.limits)
        assert isinstance(request, GenerateRequest)
        return request

    def texts(self, fields: dict[str, Any]) -> list[str]:
        """The texts of all sequences."""
        assert self._service is not None
        sender = FakeSender()
        self._service.accept(FakeSource(tensors_of(fields | {"stream": True})), sender, self.limits)
        end_s = time.monotonic() + _PATIENCE_S
        while not sender.num_finals:
            assert time.monotonic() < end_s, "no FINAL"
            time.sleep(0.001)
        assert sender.errors == []
        texts = [""] * fields.get("num_return_sequences", 1)
        for response in sender.responses:
            index = int(response["sequence_index"].item()) if "sequence_index" in response else 0
            texts[index] += response["text_output"].item().decode()
        return texts

    def close(self) -> None:
        """End everything."""
        self.engine.close(timeout_s=0)
        if self._service is not None:
            self._service.close()

    def _take(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        if self._service is not None:
            self._service.take_outputs(outputs, stats)


@dataclass(frozen=True)
class Stack:
    """Both doors of one engine.

    Attributes:
        openai: the address of the API, as `helpers.server.Server` has it; its model has the name of the
            checkpoint's directory.
        text: the other door.
    """

    openai: str
    text: TextService


@contextlib.contextmanager
def openai_stack(checkpoint: Path) -> Iterator[Stack]:
    """Serve a tiny checkpoint."""
    directory = runtime_directory(os.getpid())
    config = EngineConfig(
        model_dir=str(checkpoint),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=20_000_000,
        max_num_batched_tokens=256,
    )
    text = TextService(checkpoint, directory / "llm.0.engine", config)
    try:
        with _app() as address:
            _wait_for_model(address)
            yield Stack(address, text)
    finally:
        text.close()
        remove_runtime_directory(directory)


def _wait_for_model(address: str) -> None:
    """Wait until the server has connected to the engine, which it does in a thread of its own."""
    end_s = time.monotonic() + _PATIENCE_S
    while not _listed(address):
        assert time.monotonic() < end_s, "the server does not list the model"
        time.sleep(0.02)


def _listed(address: str) -> list[Any]:
    with urllib.request.urlopen(f"{address}/models", timeout=_PATIENCE_S) as answer:
        models: list[Any] = json.load(answer)["data"]
    return models


@contextlib.contextmanager
def _app() -> Iterator[str]:
    """The OpenAI server in a thread of its own, which finds the engines below this process."""
    loop = asyncio.new_event_loop()
    app = make_app(ServerOptions(server_pid=os.getpid()))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
