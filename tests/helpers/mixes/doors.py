"""The doors of an engine in this process: real readers, services and writers, without a server between."""

from __future__ import annotations

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from helpers.fake_triton import shipped_config
from helpers.mixes.clients import AttachedMixClient, OwningMixClient
from helpers.mixes.drawn import Asked, Door, Fields
from helpers.mixes.replies import Reply
from helpers.triton_server_doubles import LLM_SHAPE, FakeSource
from naiad.engine_process import Ack
from naiad.engine_process.protocol import Ready
from naiad.errors import EngineLostError, NaiadError
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.field import Frontend, Kind
from naiad.frontend.fields import FIELD
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.bodies import ChatBody, CompletionBody, parse_body
from naiad.openai_server.api.errors import APIError, api_error_of
from naiad.openai_server.api.reading import RequestReader
from naiad.openai_server.api.tally import Tally
from naiad.openai_server.api.writers import ChatWriter, CompletionWriter
from naiad.openai_server.engines.local_generation import LocalGeneration
from naiad.openai_server.generate import _stream, _whole
from naiad.outputs import EngineStats, RequestOutput
from naiad.tokenization import Tokenizer, pack_word_list
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.requests.tokenizer import TokenizerReader
from naiad.triton_server.requests.vllm import VLLMRequestReader
from naiad.triton_server.responses.detokenizer import chunk_outputs, read_short_chunk
from naiad.triton_server.responses.text import TextWriter
from naiad.triton_server.responses.vllm import VLLMWriter
from naiad.triton_server.service.llm_service import LLMService, RequestShape

_DTYPES = {Kind.BOOL: np.bool_, Kind.FP32: np.float32, Kind.STRING: np.object_}
_PACKED = (2, -1)


class MixDoor(ABC):
    """A client of the engine, and the requests that come through it.

    Attributes:
        client: sends requests to the engine and gets its outputs.
        limits: those of the model.
        finished: the sequences that have had their last output.
    """

    client_kind: type[OwningMixClient | AttachedMixClient] = AttachedMixClient

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.client = self.client_kind(self)
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.limits = ModelLimits(0, vocab_size, (), exclude_input_in_output=False)
        self.finished: set[int] = set()
        self._ids = itertools.count(1)
        self._is_open = False

    def draw_first_id(self, num_sequences: int) -> int:
        first_id = next(self._ids)
        self._ids = itertools.count(first_id + num_sequences)
        return first_id

    def open(self, info: Ready) -> None:
        """An engine serves."""
        self.limits = ModelLimits(
            info.max_model_len, info.vocab_size, tuple(info.eos_token_ids), exclude_input_in_output=False
        )
        if not self._is_open:
            self._is_open = True
            self._open()

    def take_outputs(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        """Take outputs of the engine."""
        for output in outputs:
            assert output.sequence_id not in self.finished, "an output after the last"
            if output.finish_reason is not None:
                self.finished.add(output.sequence_id)
        self._take(outputs, stats)

    def encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.limits.max_model_len, self.vocab_size)

    @abstractmethod
    def _open(self) -> None:
        """Get ready for requests: the limits are known."""

    @abstractmethod
    def _take(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        """Take outputs."""

    @abstractmethod
    def lose(self, sequence_ids: list[int] | None = None) -> None:
        """The engine that had these sequences, or all, is gone."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Cancel the requests of this id."""

    @abstractmethod
    def start(self, asked: Asked, request_id: str) -> Reply:
        """Send a request."""

    @abstractmethod
    def leave(self, reply: Reply) -> None:
        """The client goes away."""


class _Sender:
    """Keeps what a client of Triton gets."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def send(self, tensors: dict[str, Any] | None, *, final: bool) -> None:
        assert self._reply.num_finals == 0, "a response after FINAL"
        if tensors is not None:
            self._keep(tensors)
        self._reply.num_finals += final

    def _keep(self, tensors: dict[str, Any]) -> None:
        self._reply.add(tensors)

    def send_error(self, error: NaiadError) -> None:
        assert self._reply.num_finals == 0, "an error after FINAL"
        self._reply.errors.append((error.status, str(error)))
        self._reply.num_finals += 1

    def is_cancelled(self) -> bool:
        return self._reply.has_left


class ServiceDoor(MixDoor):
    """A model of Triton that takes and returns text, or ids."""

    def __init__(self, kind: Door, *args: Any) -> None:
        super().__init__(*args)
        self._kind = kind
        self.bugs: list[str] = []

    def _open(self) -> None:
        self.service = LLMService(
            self.client,
            self.bugs.append,
            self.draw_first_id,
            self._shape(),
            owns_engine=self._kind is Door.LLM,
        )

    def _shape(self) -> RequestShape:
        texts, table = ChunkTexts(self.tokenizer.table), self.tokenizer.table
        if self._kind is Door.TEXT:
            writer = TextWriter(texts, accumulates=False)
            return RequestShape(read=TextRequestReader(self.encoder()).read, build=writer.write)
        if self._kind is Door.VLLM:
            return RequestShape(
                read=VLLMRequestReader(self.encoder()).read,
                build=VLLMWriter(texts, table).write,
                cancel_message="Request was cancelled",
            )
        return LLM_SHAPE

    def _take(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        self.service.take_outputs(outputs, stats)

    def lose(self, sequence_ids: list[int] | None = None) -> None:
        self.service.engine_lost(sequence_ids)

    def cancel(self, request_id: str) -> None:
        self.service.cancel_requests(request_id)

    def stop(self, request_id: str) -> Reply:
        """Send a request that stops others."""
        reply = Reply()
        source = FakeSource({"stop": np.array([[True]])}, request_id=request_id)
        self.service.accept(source, _Sender(reply), self.limits)
        return reply

    def start(self, asked: Asked, request_id: str) -> Reply:
        reply = Reply()
        if self._kind is Door.VLLM:
            inputs, parameters = _vllm_inputs(asked)
        else:
            inputs, parameters = _rows_of_tensors(asked, self._kind.value[0])
        source = FakeSource(inputs, parameters, request_id, asked.timeout_us)
        self.service.accept(source, _Sender(reply), self.limits)
        return reply

    def leave(self, reply: Reply) -> None:
        reply.has_left = True


class EnsembleDoor(ServiceDoor):
    """`llm` with the tokenizer before it and the detokenizer behind it, joined as the ensemble joins them.

    Args:
        schedule_ack: calls `take_ack` later with an acknowledgement.
    """

    client_kind = OwningMixClient

    def __init__(self, schedule_ack: Callable[[Callable[[], None]], None], *args: Any) -> None:
        super().__init__(Door.LLM, *args)
        self._schedule_ack = schedule_ack
        self._steps = shipped_config("ensemble").ensemble_scheduling.step

    def start(self, asked: Asked, request_id: str) -> Reply:
        if asked.door is Door.LLM:
            return super().start(asked, request_id)
        reply = Reply()
        sender = _EnsembleSender(reply, self)
        tensors, parameters = _rows_of_tensors(asked, Frontend.ENSEMBLE)
        first, second, _ = self._steps
        try:
            source = FakeSource(_mapped(tensors, first.input_map), parameters)
            made = TokenizerReader(self.encoder()).read(source)
        except NaiadError as error:
            sender.send_error(error)
            return reply
        tensors |= {first.output_map[name]: each for name, each in made.items() if name in first.output_map}
        inputs = _mapped(tensors, second.input_map)
        self.service.accept(FakeSource(inputs, parameters, request_id, asked.timeout_us), sender, self.limits)
        return reply

    def detokenize(self, reply: Reply, tensors: dict[str, Any]) -> None:
        """Turn a chunk into text, and acknowledge it after a while."""
        _, second, last = self._steps
        outer = {second.output_map[name]: each for name, each in tensors.items() if name in second.output_map}
        inputs = _mapped(outer, last.input_map)
        chunk = read_short_chunk(inputs)
        made = chunk_outputs(self.tokenizer.table, inputs, chunk, True)
        if made is not None:
            reply.add({last.output_map[name]: each for name, each in made.items() if name in last.output_map})
        sequence_id = int(tensors["sequence_id"].item()) if chunk is None else chunk.sequence_id
        self._schedule_ack(lambda: self.service.take_acks([Ack(sequence_id, 1, reply.has_left)]))


class _EnsembleSender(_Sender):
    def __init__(self, reply: Reply, door: EnsembleDoor) -> None:
        super().__init__(reply)
        self._door = door

    def _keep(self, tensors: dict[str, Any]) -> None:
        self._door.detokenize(self._reply, tensors)


def _mapped(tensors: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {inner: tensors[outer] for inner, outer in names.items() if outer in tensors}


def _rows_of_tensors(asked: Asked, frontend: Frontend) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors [rows, …] and the parameters of a request."""
    tensors: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name in asked.rows[0]:
        field, values = FIELD[name], [row[name] for row in asked.rows]
        # A single tensor says how many rows there are.
        is_common = name != "max_tokens" and all(value == values[0] for value in values)
        if asked.as_parameters and is_common and field.comes_as_parameter and field.is_scalar:
            parameters[name] = values[0] if field.name != "messages" else json.dumps(values[0])
        else:
            tensors[field.name_at(frontend)] = _tensor(name, values)
    if "input_ids" in tensors:
        lengths = [[len(row["input_ids"])] for row in asked.rows]
        tensors["input_lengths"] = np.array(lengths, dtype=np.int32)
    return tensors, parameters


def _tensor(name: str, values: list[Any]) -> Any:
    field = FIELD[name]
    if name == "messages":
        values = [json.dumps(value) for value in values]
    if field.dims == _PACKED:
        packed = [pack_word_list(words) for words in values]
        width = max(each.shape[1] for each in packed)
        padding = np.array([[0], [-1]], dtype=np.int32)
        return np.stack(
            [np.concatenate([each, *[padding] * (width - each.shape[1])], axis=1) for each in packed]
        )
    rows = [value if isinstance(value, list) else [value] for value in values]
    width = max(map(len, rows))
    rows = [[item.encode() if isinstance(item, str) else item for item in row] for row in rows]
    padded = [row + [0] * (width - len(row)) for row in rows]
    return np.array(padded, dtype=_DTYPES.get(field.kind, field.kind.value.lower()))


def _vllm_inputs(asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
    row = asked.rows[0]
    as_tensors = {name: value for name, value in row.items() if FIELD[name].name_at(Frontend.VLLM)}
    as_keys = {name: value for name, value in row.items() if name not in as_tensors}
    parameters: dict[str, Any] = {}
    if asked.as_parameters:
        parameters = {
            name: as_tensors.pop(name)
            for name in list(as_tensors)
            if FIELD[name].is_scalar and FIELD[name].comes_as_parameter and name != "messages"
        }
    tensors = {
        FIELD[name].name_at(Frontend.VLLM): _tensor(name, [value])[0] for name, value in as_tensors.items()
    }
    keys = json.dumps(_keys(as_keys, Frontend.SAMPLING_PARAMETERS)).encode()
    return tensors | {"sampling_parameters": np.array([keys], dtype=np.object_)}, parameters


def _keys(row: Fields, frontend: Frontend) -> Fields:
    """The fields as the keys of a JSON object."""
    sent = {
        FIELD[name].name_at(frontend): value
        for name, value in row.items()
        if FIELD[name].name_at(frontend) and name not in ("logit_bias_ids", "logit_bias_values")
    }
    if "logit_bias_ids" in row:
        values = row.get("logit_bias_values", [1.0] * len(row["logit_bias_ids"]))
        sent["logit_bias"] = {
            str(each): value for each, value in zip(row["logit_bias_ids"], values, strict=True)
        }
    return sent


class OpenAIDoor(MixDoor):
    """Completions and chats: from bodies to events."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(*args)
        self._loop = loop
        self._live: dict[int, LocalGeneration] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def _open(self) -> None:
        self._reader = RequestReader(self.encoder(), self.limits)
        self._texts = ChunkTexts(self.tokenizer.table)

    def _take(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        for output in outputs:
            generation = self._live.get(output.sequence_id)
            if generation is not None:
                generation.take(output)
                generation.wake()

    def lose(self, sequence_ids: list[int] | None = None) -> None:
        found = {id(each): each for each in map(self._live.get, sequence_ids or ()) if each is not None}
        for generation in found.values():
            generation.fail(EngineLostError())
            generation.wake()

    def cancel(self, request_id: str) -> None:
        """Other doors' clients do not stop these requests."""

    def start(self, asked: Asked, request_id: str) -> Reply:
        reply = Reply()
        task = self._loop.create_task(self._answer(asked, request_id, reply))
        self._tasks[id(reply)] = task
        task.add_done_callback(partial(self._ended, reply))
        return reply

    def leave(self, reply: Reply) -> None:
        reply.has_left = True
        self._tasks[id(reply)].cancel()

    def _ended(self, reply: Reply, task: asyncio.Task[None]) -> None:
        reply.num_finals += 1
        if task.cancelled():
            reply.errors.append(("CANCELLED", "the client is gone"))
        elif task.exception() is not None:
            reply.errors.append((500, repr(task.exception())))

    async def _answer(self, asked: Asked, request_id: str, reply: Reply) -> None:
        is_chat = asked.door is Door.CHAT
        raw = json.dumps(_body(asked)).encode()
        try:
            body, _ = parse_body(raw, ChatBody if is_chat else CompletionBody, is_lenient=False)
            read: Any = self._reader.chat if is_chat else self._reader.completion
            generation, made = self._begin(read(body, request_id))
        except (APIError, NaiadError) as error:
            failed = api_error_of(error) if isinstance(error, NaiadError) else error
            reply.errors.append((failed.status, failed.message))
            return
        tally = Tally(made.request, drops_tokens=made.drops_tokens)
        write: Any = ChatWriter if is_chat else CompletionWriter
        writer = write(body, made, self.tokenizer.table, request_id)
        try:
            if body.stream:
                await _stream(generation, writer, tally, _Events(reply))  # type: ignore[arg-type]
            else:
                _keep_whole(reply, json.loads(await _whole(generation, writer, tally)))
        except NaiadError as error:
            failed = api_error_of(error)
            reply.errors.append((failed.status, failed.message))
        finally:
            generation.close()

    def _begin(self, made: Any) -> tuple[LocalGeneration, Any]:
        first_id = self.draw_first_id(made.request.num_sequences)
        generation = LocalGeneration(made.request, first_id, self._texts, self._end, made.parsers())
        self.client.submit(made.request.engine_requests(first_id))
        self._live.update(dict.fromkeys(generation.sequence_ids, generation))
        return generation, made

    def _end(self, generation: LocalGeneration, live_ids: list[int]) -> None:
        for sequence_id in generation.sequence_ids:
            del self._live[sequence_id]
        if live_ids:
            self.client.abort(live_ids)


def _body(asked: Asked) -> Fields:
    row = asked.rows[0]
    body = _keys(row, Frontend.OPENAI) | {"model": "first", "return_token_ids": True, "stream": False}
    if asked.door is Door.CHAT:
        body |= {"messages": row["messages"], "logprobs": row["seed"] % 2 == 0}
    else:
        body |= {"prompt": row["text_input"], "echo": row["seed"] % 4 == 1, "logprobs": row["seed"] % 3}
    # The table has no streams of this door.
    if row["seed"] % 5 < 3:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | ({"timeout_s": asked.timeout_us / 1e6} if asked.timeout_us else {})


class _Events:
    """Takes the events of a stream; stands in for `EventStream`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._is_done = False

    async def write(self, data: bytes) -> None:
        for event in data.decode().split("\n\n")[:-1]:
            assert not self._is_done, "an event after [DONE]"
            text = event.removeprefix("data: ")
            if text == "[DONE]":
                self._is_done = True
                continue
            chunk = json.loads(text)
            if "error" in chunk:
                self._is_done = True
                self._reply.errors.append((chunk["error"]["type"], chunk["error"]["message"]))
            else:
                _keep_chunk(self._reply, chunk)

    async def comment(self) -> None:
        """Nobody needs to be kept alive."""


def _keep_whole(reply: Reply, answer: Fields) -> None:
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        _keep_choice(reply, choice, text or "")
    _keep_usage(reply, answer["usage"])


def _keep_chunk(reply: Reply, chunk: Fields) -> None:
    for choice in chunk["choices"]:
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        _keep_choice(reply, choice, text)
    if chunk.get("usage"):
        _keep_usage(reply, chunk["usage"])


def _keep_choice(reply: Reply, choice: Fields, text: str) -> None:
    kept = {
        "sequence_index": [choice["index"]],
        "text_output": [text],
        "token_ids": choice.get("token_ids", []),
        "logprobs": _log_probs(choice.get("logprobs")),
    }
    if choice["finish_reason"] is not None:
        kept |= {"finish_reason": [choice["finish_reason"]], "stop_reason": [choice["stop_reason"]]}
    reply.responses.append(kept)


def _log_probs(log_probs: Fields | None) -> list[Any]:
    if log_probs is None:
        return []
    if "content" in log_probs:
        return [(each["token"], each["logprob"]) for each in log_probs["content"]]
    return list(zip(log_probs["tokens"], log_probs["token_logprobs"], strict=True))


def _keep_usage(reply: Reply, usage: Fields) -> None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    reply.responses.append({"sequence_index": [-1], "usage": [usage[name] for name in names]})
