"""Requests over gRPC streams, each token streamed; and the models of a server as contestants."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
from perf.server.serve_process import Served
from tritonclient.utils import InferenceServerException

from naiad.cli.throughput import Generate, Prompts, check_counts
from naiad.errors import InternalError

Inputs = dict[str, npt.NDArray[Any]]

_COUNTED_AFTER_S = 5.0
_DATATYPES = {"b": "BOOL", "i": "INT32", "O": "BYTES"}


def llm_inputs(prompt: list[int], num_tokens: int) -> Inputs:
    """Tensors that ask `llm` for exactly so many tokens, streamed."""
    return {
        "input_ids": np.array([prompt], dtype=np.int32),
        "input_lengths": np.array([[len(prompt)]], dtype=np.int32),
        "request_output_len": np.array([[num_tokens]], dtype=np.int32),
        "streaming": np.array([[True]]),
        "ignore_eos": np.array([[True]]),
    }


def text_inputs(text: str, num_tokens: int) -> Inputs:
    """Tensors that ask `ensemble` or `text` for exactly so many tokens, streamed."""
    return {
        "text_input": np.array([[text.encode()]], dtype=np.object_),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
        "ignore_eos": np.array([[True]]),
    }


async def responses(client: Any, model: str, inputs: Mapping[str, npt.NDArray[Any]]) -> AsyncIterator[Any]:
    """The responses that carry tensors.

    Args:
        client: of `tritonclient.grpc.aio`.
        model: its name.
        inputs: name → `[1, …]`.

    Raises:
        InternalError: what the server answered instead, or how the call broke.
    """

    async def request() -> AsyncIterator[dict[str, Any]]:
        tensors = []
        for name, array in inputs.items():
            tensor = triton.InferInput(name, list(array.shape), _DATATYPES[array.dtype.kind])
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        yield {"model_name": model, "inputs": tensors}

    try:
        async for result, error in client.stream_infer(request()):
            if error is not None:
                raise InternalError(str(error))
            if result.get_response().outputs:
                yield result
    except (InferenceServerException, grpc.RpcError) as error:
        raise InternalError(str(error)) from error


def llm_generate(url: str) -> Generate:
    """Ask the token model: prompts, number of new tokens → the new ids of each prompt."""

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        made = all_at_once(url, [stream_of(prompt, num_tokens) for prompt in prompts])
        check_counts(made, num_tokens)
        return made

    def stream_of(prompt: list[int], num_tokens: int) -> Callable[[Any], Coroutine[Any, Any, list[int]]]:
        return lambda client: _llm_stream(client, prompt, num_tokens)

    return generate


def text_generate(
    server: Served, model: str, decode: Callable[[list[int]], str]
) -> Callable[[Prompts, int], list[str]]:
    """Ask a text model: prompts, number of new tokens → the text made of each prompt.

    Texts tell no number of tokens, so the server's counters are checked: nobody else is to use it.

    Args:
        server: where to ask.
        model: "ensemble" or "text".
        decode: ids → text that the server's tokenizer turns into the same ids.
    """

    def generate(prompts: Prompts, num_tokens: int) -> list[str]:
        before = _totals_at_rest(server)
        texts = all_at_once(server.grpc, [stream_of(prompt, num_tokens) for prompt in prompts])
        asked = [sum(len(prompt) for prompt in prompts), num_tokens * len(prompts)]
        _totals_at_rest(server, [a + b for a, b in zip(before, asked, strict=True)])
        return texts

    def stream_of(prompt: list[int], num_tokens: int) -> Callable[[Any], Coroutine[Any, Any, str]]:
        return lambda client: _text_stream(client, model, text_inputs(decode(prompt), num_tokens))

    return generate


def all_at_once(url: str, streams: list[Callable[[Any], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Run streams side by side on one connection; what each of them gave."""

    async def run() -> list[Any]:
        async with triton.InferenceServerClient(url) as client:
            return await asyncio.gather(*(stream(client) for stream in streams))

    return asyncio.run(run())


async def _llm_stream(client: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids: list[int] = []
    async for result in responses(client, "llm", llm_inputs(prompt, num_tokens)):
        ids += result.as_numpy("output_ids").reshape(-1).tolist()
    return ids


async def _text_stream(client: Any, model: str, inputs: Inputs) -> str:
    parts: list[bytes] = []
    async for result in responses(client, model, inputs):
        parts += result.as_numpy("text_output").reshape(-1).tolist()
    return b"".join(parts).decode()


def _totals_at_rest(server: Served, expected: list[float] | None = None) -> list[float]:
    """Tokens of prompts, and new ones, that the server has counted once nothing runs.

    Raises:
        InternalError: something runs on, or they do not become what is expected.
    """
    names = ("vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    end_s = time.monotonic() + _COUNTED_AFTER_S
    while True:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        num_running, *totals = (
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
            for name in names
        )
        if not num_running and expected in (None, totals):
            return totals
        if time.monotonic() > end_s:
            raise InternalError(
                f"{num_running:g} sequences run, and the server has counted {totals} tokens of prompts and "
                f"of texts; expected {expected or 'none to run'}"
            )
        time.sleep(0.01)
