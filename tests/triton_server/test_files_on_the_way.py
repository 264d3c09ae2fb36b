"""Limits the number of files that a request passes on its way to the engine, and its output on the way back.

Counted are the files of the frontends' packages whose code runs, except the metrics. The model's own file
comes before them and the engine client after them; on the way back `pb` comes last.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import naiad
from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    FakeSource,
    let_senders_finish,
    llm_source,
)
from helpers.vllm_requests import make_reader, source
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.prompt import PromptEncoder
from naiad.outputs import RequestOutput
from naiad.sequence import FinishReason
from naiad.tokenization import Tokenizer
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.responses.text import TextWriter
from naiad.triton_server.responses.vllm import VLLMWriter
from naiad.triton_server.service.llm_service import LLMService, RequestShape

# Eight with the model's file, or with `pb`.
MOST_IN, MOST_OUT = 7, 7
PACKAGE = Path(naiad.__file__).parent
ROOMS = ("triton_server", "frontend")


def text_source() -> FakeSource:
    prompt = np.array([[b"The quick"]], dtype=np.object_)
    return FakeSource({"text_input": prompt, "max_tokens": np.array([[4]]), "stream": np.array([[True]])})


@pytest.fixture(scope="module")
def ways(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[RequestShape, Callable[[], FakeSource]]]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer("byte_level")))
    encoder = PromptEncoder(tokenizer, LIMITS.max_model_len, LIMITS.vocab_size)
    texts = ChunkTexts(tokenizer.table)
    text = RequestShape(TextRequestReader(encoder).read, TextWriter(texts, accumulates=False).write)
    vllm = RequestShape(make_reader(tokenizer).read, VLLMWriter(texts, tokenizer.table).write)
    return {
        "llm": (LLM_SHAPE, lambda: llm_source(streaming=True)),
        "text": (text, text_source),
        "vllm": (vllm, lambda: source({"temperature": 0}, stream=True)),
    }


@contextmanager
def files_that_run() -> Iterator[set[str]]:
    """The packages' files whose functions are called in the `with` block, by their path."""
    found: set[str] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(see)
    threading.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def on_the_way(files: set[str]) -> list[str]:
    return sorted(
        file for file in files if file.startswith(ROOMS) and not file.startswith("triton_server/metrics")
    )


@pytest.mark.parametrize("frontend", ["llm", "text", "vllm"])
def test_a_request_and_its_output_pass_few_files(ways: Any, frontend: str) -> None:
    shape, new_source = ways[frontend]
    sender = FakeSender()
    with files_that_run() as started:
        service = LLMService(FakeEngineClient(), pytest.fail, CountedIds(), shape)
    with files_that_run() as inwards:
        service.accept(new_source(), sender, LIMITS)
    assert sender.errors == []
    started.clear()  # its threads keep recording what they run
    with files_that_run() as outwards:
        service.take_outputs([RequestOutput(1, [9], [8])], None)
        service.take_outputs([RequestOutput(1, [10], [9], finish_reason=FinishReason.STOP)], None)
        let_senders_finish(service)
    service.close()
    assert sender.num_finals == 1
    assert len(on_the_way(inwards)) <= MOST_IN, on_the_way(inwards)
    assert len(on_the_way(outwards | started)) <= MOST_OUT, on_the_way(outwards | started)
