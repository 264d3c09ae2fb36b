"""A client goes away while its prompt is computed, which takes the default model a while."""

from __future__ import annotations

import pytest

from helpers.raw_grpc import Stream, llm_inputs, text_inputs
from helpers.server import Server, eventually

LONG = [1000 + i % 3000 for i in range(1900)]
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 185


def free_again(server: Server) -> None:
    eventually(lambda: server.used_blocks() == 0, 30)


@pytest.mark.parametrize("model", ["llm", "ensemble", "text"])
def test_cancel_in_prefill(server: Server, model: str) -> None:
    inputs = llm_inputs(LONG, 400) if model == "llm" else text_inputs(LONG_TEXT, 400)
    free_again(server)
    stream = Stream(server.grpc, model, inputs | {"ignore_eos": True})
    eventually(lambda: server.used_blocks() > 0)
    num_before = server.num_aborted()
    stream.cancel()
    free_again(server)
    eventually(lambda: server.num_aborted() == num_before + 1)
    assert stream.join().responses == []
