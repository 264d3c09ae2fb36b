"""Requests of a soak: drawn once, sent by their door again and again, and heard to their end."""

from __future__ import annotations

import asyncio
import enum
import json
import random
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
from perf.server.serve_process import Served
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_FINAL, _EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
_DTYPES = {
    "INT32": np.int32,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
_TYPES_OF_FIELDS = {"temperature": "FP32", "top_p": "FP32", "runtime_top_p": "FP32", "seed": "UINT64"}
_WORDS = ("river", "engine", "winter", "paper", "number", "garden", "signal", "harbour", "letter", "market")
_BEGINNINGS = (
    "You are a careful clerk who keeps the ledger of a small harbour and answers in few words. ",
    "The following notes were written by an engineer during the tests of a new engine. ",
    "Once upon a time, in a town beside a wide river, there lived a watchmaker. ",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_REGEX = "[a-z]{3,8}( [a-z]{2,9}){1,5}"
# How the error of a request begins that has not ended in time.
NO_END = "no end after"


class Door(enum.Enum):
    """By which way a request comes; the value is the path, or the model of a gRPC stream."""

    TEXT = "/v2/models/text/generate"
    TEXT_STREAM = "/v2/models/text/generate_stream"
    ENSEMBLE = "ensemble"
    LLM = "llm"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"

    @property
    def is_openai(self) -> bool:
        """Whether the OpenAI server answers."""
        return self.value.startswith("/v1/")

    @property
    def is_grpc(self) -> bool:
        """Whether it is a stream of gRPC."""
        return not self.value.startswith("/")


@dataclass(frozen=True, slots=True)
class Question:
    """A request.

    Attributes:
        number: its place among the questions.
        door: how it comes.
        asked: JSON fields at a door of HTTP, tensors' values at one of gRPC.
    """

    number: int
    door: Door
    asked: Mapping[str, Any]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.door.is_grpc or bool(self.asked.get("stream"))


@dataclass(slots=True)
class Heard:
    """What has come of a request.

    Attributes:
        pieces: index of the sequence → its text, or its ids, as they came.
        reasons: the finish reasons that were said, one for each sequence.
        num_ends: ends that were told: FINAL of gRPC, `[DONE]`, the end of a body.
        error: why it failed; empty: it did not.
        has_left: whether the client hung up.
    """

    pieces: dict[int, list[Any]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    num_ends: int = 0
    error: str = ""
    has_left: bool = False

    @property
    def answer(self) -> list[Any]:
        """Text, or a list of ids, of each sequence."""
        answers = (parts for _, parts in sorted(self.pieces.items()))
        return ["".join(each) if each and isinstance(each[0], str) else each for each in answers]

    def take(self, index: int, piece: str | list[int]) -> None:
        """Add a piece."""
        parts = self.pieces.setdefault(index, [])
        parts.extend([piece] if isinstance(piece, str) else piece)


def draw_questions(num_questions: int, vocab_size: int) -> list[Question]:
    """Draw as many questions, always the same, over all doors and kinds of sampling."""
    draw = random.Random("soak")
    doors = list(Door)
    return [
        _question(number, doors[number % len(doors)], draw, vocab_size) for number in range(num_questions)
    ]


def _question(number: int, door: Door, draw: random.Random, vocab_size: int) -> Question:
    words = " ".join(draw.choice(_WORDS) for _ in range(draw.randrange(2, 40)))
    text = f"{draw.choice(_BEGINNINGS)}{words} {number}"
    fields: dict[str, Any] = {"max_tokens": draw.choice((4, 12, 24, 48))}
    if draw.random() < 0.6:
        fields |= {"temperature": draw.choice((0.5, 1.0)), "top_p": 0.9, "seed": draw.randrange(1 << 31)}
    else:
        fields |= {"temperature": 0.0}
    if draw.random() < 0.3:
        fields |= {"frequency_penalty": 0.5}
    constraint = draw.choice((None, None, None, "json_schema", "regex"))
    if door.is_openai:
        return Question(number, door, _openai_fields(door, text, fields, constraint, draw))
    if constraint is not None:
        guide = json.dumps(_SCHEMA) if constraint == "json_schema" else _REGEX
        fields |= {"guided_decoding_guide_type": constraint, "guided_decoding_guide": guide}
    if door is Door.LLM:
        ids = [draw.randrange(1000, vocab_size) for _ in range(draw.randrange(4, 200))]
        return Question(number, door, _llm_fields(ids, fields))
    asked = fields | {"text_input": text, "stream": door is not Door.TEXT, "return_finish_reason": True}
    return Question(number, door, asked | ({} if asked["stream"] else {"exclude_input_in_output": True}))


def _openai_fields(
    door: Door, text: str, fields: dict[str, Any], constraint: str | None, draw: random.Random
) -> dict[str, Any]:
    prompt = (
        {"prompt": text} if door is Door.COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    )
    asked = fields | prompt | {"stream": draw.random() < 0.7}
    if constraint == "json_schema":
        asked["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True},
        }
    elif constraint == "regex":
        asked["structured_outputs"] = {"regex": _REGEX}
    if "seed" in fields and draw.random() < 0.2:
        asked["n"] = 2
    return asked


def _llm_fields(ids: list[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"max_tokens": "request_output_len", "top_p": "runtime_top_p"}
    named = {renamed.get(name, name): value for name, value in fields.items()}
    return {"input_ids": ids, "input_lengths": len(ids), "streaming": True, **named}


class Asker:
    """Sends questions to a server; an asynchronous context manager."""

    def __init__(self, server: Served, model: str) -> None:
        """Set up.

        Args:
            server: the server.
            model: the model's name at the OpenAI API.
        """
        self._server, self._model = server, model

    async def __aenter__(self) -> Asker:
        """Open the client's side."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
        )
        # The server comes back on the same port.
        options = [("grpc.max_reconnect_backoff_ms", 1000)]
        self._channel = grpc.aio.insecure_channel(self._server.grpc, options=options)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self._session.close()
        await self._channel.close()

    async def ask(
        self, question: Question, *, leaves_after: int | None = None, deadline_us: int | None = None
    ) -> Heard:
        """Send a question and hear its answer.

        Args:
            question: the question.
            leaves_after: the client hangs up after so many pieces of a streamed answer; None: it stays.
            deadline_us: the request's own deadline in microseconds, at Triton's doors; None: it has none.
        """
        heard = Heard()
        asked = {**question.asked}
        if deadline_us is not None:
            asked["timeout"] = deadline_us
        try:
            hears = self._hear_grpc if question.door.is_grpc else self._hear_http
            async for _ in hears(question.door, asked, heard):
                if leaves_after is not None and sum(map(len, heard.pieces.values())) >= leaves_after:
                    heard.has_left = True
                    break
        except (aiohttp.ClientError, ConnectionError) as error:
            heard.error = f"the connection broke: {type(error).__name__} {error}"
        except grpc.RpcError as error:
            heard.error = f"the call broke: {error.code()} {error.details()}"
        return heard

    async def _hear_grpc(self, door: Door, asked: Mapping[str, Any], heard: Heard) -> AsyncIterator[None]:
        stream = self._channel.stream_stream(_STREAM, service_pb2.ModelInferRequest.SerializeToString)
        call = stream(iter([_grpc_request(door.value, asked)]))
        try:
            async for raw in call:
                _take_grpc(service_pb2.ModelStreamInferResponse.FromString(raw), heard)
                yield
        finally:
            call.cancel()

    async def _hear_http(self, door: Door, asked: dict[str, Any], heard: Heard) -> AsyncIterator[None]:
        if door.is_openai:
            url, body = f"http://{self._server.openai}{door.value}", asked | {"model": self._model}
        else:
            url, body = f"http://{self._server.http}{door.value}", asked
        async with self._session.post(url, json=body) as answer:
            if answer.status != 200:
                heard.error = f"{answer.status} {(await answer.text())[:300]}"
                heard.num_ends += 1
            elif not asked.get("stream"):
                _take_whole(door, await answer.json(content_type=None), heard)
                heard.num_ends += 1
            else:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        _take_event(door, line.removeprefix(b"data: ").strip(), heard)
                        yield
                heard.num_ends += 0 if door.is_openai else 1


def _grpc_request(model: str, asked: Mapping[str, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters[_EMPTY_FINAL].bool_param = True
    for name, value in asked.items():
        if name == "timeout":
            request.parameters[name].int64_param = value
            continue
        datatype = _TYPES_OF_FIELDS.get(name, _datatype(value))
        values = [value.encode()] if isinstance(value, str) else value
        array = np.array(values, dtype=_DTYPES[datatype]).reshape(1, -1)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        request.raw_input_contents.append(raw)
    return request


def _datatype(value: Any) -> str:
    if isinstance(value, str):
        return "BYTES"
    if isinstance(value, bool):
        return "BOOL"
    return "FP32" if isinstance(value, float) else "INT32"


def _take_grpc(message: Any, heard: Heard) -> None:
    answer = message.infer_response
    heard.num_ends += answer.parameters[_FINAL].bool_param
    if message.error_message:
        heard.error = message.error_message
        return
    outputs = {
        output.name: raw for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    if "output_ids" in outputs:
        heard.take(0, np.frombuffer(outputs["output_ids"], dtype=np.int32).tolist())
    if "text_output" in outputs:
        heard.take(0, _one_text(outputs["text_output"]))
    if reason := _one_text(outputs.get("finish_reason", b"")):
        heard.reasons.append(reason)


def _one_text(raw: bytes) -> str:
    return deserialize_bytes_tensor(raw)[0].decode() if raw else ""


def _take_whole(door: Door, answer: Mapping[str, Any], heard: Heard) -> None:
    if not door.is_openai:
        heard.take(0, answer["text_output"])
        heard.reasons.append(answer["finish_reason"])
        return
    for choice in answer["choices"]:
        text = choice["text"] if door is Door.COMPLETIONS else choice["message"]["content"]
        heard.take(choice["index"], text or "")
        heard.reasons.append(choice["finish_reason"])


def _take_event(door: Door, raw: bytes, heard: Heard) -> None:
    if raw == b"[DONE]":
        heard.num_ends += 1
        return
    event = json.loads(raw)
    if "error" in event:
        heard.error = str(event["error"])
        return
    if not door.is_openai:
        heard.take(0, event.get("text_output", ""))
        if event.get("finish_reason"):
            heard.reasons.append(event["finish_reason"])
        return
    for choice in event["choices"]:
        text = choice["text"] if door is Door.COMPLETIONS else choice["delta"].get("content")
        heard.take(choice["index"], text or "")
        if choice["finish_reason"]:
            heard.reasons.append(choice["finish_reason"])


async def bounded(asking: Awaitable[Heard], limit_s: float) -> Heard:
    """Wait for an answer; one that does not end in time has lost its end, and says so."""
    try:
        return await asyncio.wait_for(asking, limit_s)
    except asyncio.TimeoutError:
        return Heard(error=f"{NO_END} {limit_s:g} s")
