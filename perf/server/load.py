"""Sends streaming requests over gRPC or server-sent events, to compare a server's models with others."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
from perf.server.serve_process import Served
from perf.server.sse_load import event_streams
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from naiad.cli.bench.throughput import Generate, Prompts, check_counts
from naiad.errors import InternalError, StartupError

Inputs = dict[str, npt.NDArray[Any]]
T = TypeVar("T")

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_COUNTED_AFTER_S = 5.0
_DATATYPES = {"b": "BOOL", "i": "INT32", "O": "BYTES"}


def llm_inputs(prompt: list[int], num_tokens: int) -> Inputs:
    """Tensors that ask `llm` for exactly this many tokens, streamed."""
    return {
        "input_ids": np.array([prompt], dtype=np.int32),
        "input_lengths": np.array([[len(prompt)]], dtype=np.int32),
        "request_output_len": np.array([[num_tokens]], dtype=np.int32),
        "streaming": np.array([[True]]),
        "ignore_eos": np.array([[True]]),
    }


def text_inputs(text: str, num_tokens: int) -> Inputs:
    """Tensors that ask `ensemble` or `text` for exactly this many tokens, streamed."""
    return {
        "text_input": np.array([[text.encode()]], dtype=np.object_),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
        "ignore_eos": np.array([[True]]),
    }


async def responses(client: Any, model: str, inputs: Mapping[str, npt.NDArray[Any]]) -> AsyncIterator[Any]:
    """Send a request and yield the responses that contain tensors.

    Args:
        client: a client of `tritonclient.grpc.aio`.
        model: the model's name.
        inputs: name → `[1, …]`.

    Raises:
        InternalError: the server answered with an error, or the call broke.
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


def llm_generate(server: Served, protocol: str = "grpc") -> Generate:
    """Make a function (prompts, number of new tokens) → the new ids of each prompt, which asks `llm`.

    Args:
        server: the server.
        protocol: one of `PROTOCOLS`.
    """
    answers = PROTOCOLS[protocol]

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        asked = [llm_inputs(prompt, num_tokens) for prompt in prompts]
        made = answers(server, "llm", asked, "output_ids")
        check_counts(made, num_tokens)
        return made

    return generate


def text_generate(
    server: Served, model: str, decode: Callable[[list[int]], str], protocol: str = "grpc"
) -> Callable[[Prompts, int], list[str]]:
    """Make a function (prompts, number of new tokens) → the text for each prompt, which asks a text model.

    A text does not reveal its number of tokens: `CountedTokens` checks that.

    Args:
        server: the server.
        model: "ensemble" or "text".
        decode: ids → text that the server's tokenizer encodes as the same ids.
        protocol: one of `PROTOCOLS`.
    """
    answers = PROTOCOLS[protocol]

    def generate(prompts: Prompts, num_tokens: int) -> list[str]:
        inputs = [text_inputs(decode(prompt), num_tokens) for prompt in prompts]
        return [b"".join(parts).decode() for parts in answers(server, model, inputs, "text_output")]

    return generate


def openai_model(server: Served) -> str:
    """The name of the only model of the OpenAI API, which finds it within a second after it has started."""
    deadline_s = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"http://{server.openai}/v1/models", timeout=10) as answer:
            models = json.load(answer)["data"]
        if models:
            return str(models[0]["id"])
        if time.monotonic() > deadline_s:
            raise StartupError("the OpenAI server has found no model in 10 s")
        time.sleep(0.1)


def openai_body(model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    """The body of a completion that asks for exactly this many tokens, streamed and greedy."""
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": model, "prompt": prompt, "stream": True, **sampling}


def openai_generate(
    server: Served, decode: Callable[[list[int]], str]
) -> Callable[[Prompts, int], list[str]]:
    """Make a function (prompts, number of new tokens) → the text for each prompt, which asks the OpenAI API.

    Args:
        server: the server.
        decode: ids → text that the server's tokenizer encodes as the same ids.
    """
    model = openai_model(server)

    def generate(prompts: Prompts, num_tokens: int) -> list[str]:
        bodies = [openai_body(model, decode(prompt), num_tokens) for prompt in prompts]
        asked = [body | {"stream_options": {"include_usage": True}} for body in bodies]
        streams = event_streams(server.openai, "/v1/completions", asked)
        check_counts(
            [[0] * stream[-1]["usage"]["completion_tokens"] for stream in streams],
            num_tokens,
        )
        return [
            "".join(choice["text"] for event in stream for choice in event["choices"]) for stream in streams
        ]

    return generate


def all_at_once(url: str, streams: list[Callable[[Any], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Run streams concurrently on one connection; return the result of each."""

    async def run() -> list[Any]:
        async with triton.InferenceServerClient(url) as client:
            return await asyncio.gather(*(stream(client) for stream in streams))

    return asyncio.run(run())


def _grpc_answers(server: Served, model: str, asked: list[Inputs], name: str) -> list[list[Any]]:
    """Return the output's values in all responses of each stream, concatenated."""
    streams = timed_messages(server.grpc, model, asked)
    return [
        [value for each in arrays([message for _, message in stream], name) for value in each.tolist()]
        for stream in streams
    ]


def _sse_answers(server: Served, model: str, asked: list[Inputs], name: str) -> list[list[Any]]:
    """Like `_grpc_answers`, over HTTP; texts as bytes."""
    streams = event_streams(
        server.http, f"/v2/models/{model}/generate_stream", [_body(inputs) for inputs in asked]
    )
    return [
        [value for event in stream if name in event for value in _values(event[name])] for stream in streams
    ]


def _body(inputs: Inputs) -> dict[str, Any]:
    """The JSON of a request: single values as scalars, several as a list."""
    values = {name: array.reshape(-1).tolist() for name, array in inputs.items()}
    return {
        name: each[0].decode() if isinstance(each[0], bytes) else each[0] if len(each) == 1 else each
        for name, each in values.items()
    }


def _values(said: Any) -> list[Any]:
    if isinstance(said, str):
        return [said.encode()]
    return said if isinstance(said, list) else [said]


# Name → a function (server, model, inputs of each request, name of an output) → its values for each request.
PROTOCOLS: dict[str, Callable[[Served, str, list[Inputs], str], list[list[Any]]]] = {
    "grpc": _grpc_answers,
    "sse": _sse_answers,
}


def timed_messages(url: str, model: str, asked: Sequence[Inputs]) -> list[list[tuple[float, bytes]]]:
    """Send all requests at once, each as a stream on one connection; return the messages of each stream.

    Messages are decoded later (`arrays`), so that the client takes no CPU time from the server.

    Returns:
        For each request its messages, each with the seconds since the requests were sent.

    Raises:
        InternalError: a call broke.
    """
    began_s = time.perf_counter()

    async def run() -> list[list[tuple[float, bytes]]]:
        async with grpc.aio.insecure_channel(url) as channel:
            streams = (stream_messages(channel, model, inputs, began_s) for inputs in asked)
            return await asyncio.gather(*streams)

    try:
        return asyncio.run(run())
    except grpc.RpcError as error:
        raise InternalError(str(error)) from error


async def stream_messages(
    channel: Any, model: str, inputs: Inputs, began_s: float
) -> list[tuple[float, bytes]]:
    """Send one request as a stream; return its messages, each with the seconds since `began_s`.

    Args:
        channel: of `grpc.aio`.
        model: the model's name.
        inputs: name → `[1, …]`.
        began_s: a time of `time.perf_counter`.
    """
    call = channel.stream_stream(_STREAM, service_pb2.ModelInferRequest.SerializeToString)
    answers = call(iter([_request(model, inputs)]))
    return [(time.perf_counter() - began_s, message) async for message in answers]


def _request(model: str, inputs: Inputs) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.kind], shape=array.shape)
        raw = serialize_byte_tensor(array).item() if array.dtype.kind == "O" else array.tobytes()
        request.raw_input_contents.append(raw)
    return request


def arrays(messages: Sequence[bytes], name: str) -> list[npt.NDArray[Any]]:
    """Decode one output of each response that contains tensors, flattened.

    Raises:
        InternalError: the server answered with an error.
    """
    found = []
    for message in messages:
        answer = service_pb2.ModelStreamInferResponse.FromString(message)
        if answer.error_message:
            raise InternalError(answer.error_message)
        if answer.infer_response.outputs:
            found.append(triton.InferResult(answer.infer_response).as_numpy(name).reshape(-1))
    return found


class CountedTokens:
    """Compares what a server is asked for with its own counters, between what is timed.

    The counters appear a moment after what they count, so no timed call may wait for them. There must be no
    other load on the server.
    """

    def __init__(self, server: Served) -> None:
        """Take a server that has answered nothing for a while."""
        self._server = server
        self._expected = self._totals()

    def of(self, generate: Callable[[Prompts, int], T]) -> Callable[[Prompts, int], T]:
        """Note what `generate` asks for."""

        def noted(prompts: Prompts, num_tokens: int) -> T:
            asked = (sum(len(prompt) for prompt in prompts), num_tokens * len(prompts))
            self._expected = [before + more for before, more in zip(self._expected, asked, strict=True)]
            return generate(prompts, num_tokens)

        return noted

    def check(self) -> None:
        """Wait until the server has counted what was asked for.

        Raises:
            InternalError: it has counted something else for five seconds.
        """
        end_s = time.monotonic() + _COUNTED_AFTER_S
        while (totals := self._totals()) != self._expected:
            if time.monotonic() > end_s:
                raise InternalError(
                    f"the server has counted {totals} tokens of prompts and of texts; "
                    f"expected {self._expected}"
                )
            time.sleep(0.01)

    def _totals(self) -> list[float]:
        with urllib.request.urlopen(f"http://{self._server.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return [
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
            for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        ]
