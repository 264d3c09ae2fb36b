"""Requests over gRPC streams, each token streamed; and the models of a server as contestants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from naiad.cli.throughput import Generate, Prompts, check_counts
from naiad.errors import InternalError

Inputs = dict[str, npt.NDArray[Any]]

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
    """Tensors that ask `ensemble` or `text` for exactly so many tokens, streamed and counted."""
    return {
        "text_input": np.array([[text.encode()]], dtype=np.object_),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
        "ignore_eos": np.array([[True]]),
        "return_num_input_tokens": np.array([[True]]),
        "return_num_output_tokens": np.array([[True]]),
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
    url: str, model: str, decode: Callable[[list[int]], str]
) -> Callable[[Prompts, int], list[str]]:
    """Ask a text model: prompts, number of new tokens → the text made of each prompt.

    Args:
        url: HOST:PORT of the server's gRPC endpoint.
        model: "ensemble" or "text".
        decode: ids → text that the server's tokenizer turns into the same ids.
    """

    def generate(prompts: Prompts, num_tokens: int) -> list[str]:
        return all_at_once(url, [stream_of(prompt, num_tokens) for prompt in prompts])

    def stream_of(prompt: list[int], num_tokens: int) -> Callable[[Any], Coroutine[Any, Any, str]]:
        return lambda client: _text_stream(client, model, (decode(prompt), len(prompt)), num_tokens)

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


async def _text_stream(client: Any, model: str, prompt: tuple[str, int], num_tokens: int) -> str:
    text, num_prompt_tokens = prompt
    parts: list[bytes] = []
    num_made = 0
    async for result in responses(client, model, text_inputs(text, num_tokens)):
        parts += result.as_numpy("text_output").reshape(-1).tolist()
        num_made += int(result.as_numpy("num_output_tokens").item())
        num_read = int(result.as_numpy("num_input_tokens").item())
        if num_read != num_prompt_tokens:
            raise InternalError(f"the server read {num_read} prompt tokens instead of {num_prompt_tokens}")
    if num_made != num_tokens:
        raise InternalError(f"a stream made {num_made} tokens instead of {num_tokens}")
    return b"".join(parts).decode()
