"""The routes that generate text: chats, completions, responses and messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from naiad.errors import CancelledError, InternalError, NaiadError
from naiad.openai_server.access.gate import caller_of
from naiad.openai_server.api.answers import ChatAnswer, ChatChunk, CompletionAnswer, NamedEvent, encode
from naiad.openai_server.api.anthropic.answers import MessageAnswer, MessageEvent
from naiad.openai_server.api.anthropic.body import MessageBody, read_message
from naiad.openai_server.api.anthropic.errors import MessageError
from naiad.openai_server.api.anthropic.writer import MessageWriter
from naiad.openai_server.api.bodies import ChatBody, CompletionBody, SamplingBody
from naiad.openai_server.api.errors import APIError, api_error_of
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.api.responses.answers import Response, ResponseStreamEvent
from naiad.openai_server.api.responses.body import ResponseBody, read_response
from naiad.openai_server.api.responses.writer import ResponseWriter
from naiad.openai_server.api.tally import SequenceDelta, Tally
from naiad.openai_server.api.writers import ChatWriter, CompletionWriter, Writer
from naiad.openai_server.body_reader import BodyReader
from naiad.openai_server.engines.generation import Generation
from naiad.openai_server.engines.interface import Models
from naiad.openai_server.fallbacks import Fallbacks
from naiad.openai_server.guard import trace_of
from naiad.openai_server.route import BEGAN_S, Route
from naiad.openai_server.streams import DONE, EventStream, StreamWatch, event
from naiad.tokenization import TokenTable
from naiad.tracing.request_trace import CHAT, COMPLETION, RequestTrace, Tracer

# How long the headers of a stream wait for the engine's answer: a refusal comes at once and gets a status of
# its own, and a request in the queue has been admitted.
_ADMISSION_S = 1.0
# For the engine a request has a deadline that lies ahead.
_SOON_S = 1e-6
# In a request whose prompt its key has paid for.
_CHARGED = "naiad.charged"
_CLIENT_GONE = (CancelledError.status, "the client is gone")

Body = TypeVar("Body", bound=SamplingBody)


@dataclass(frozen=True, slots=True)
class GenerateRoutes:
    """Handlers of requests that generate text.

    Attributes:
        models: the models to choose from.
        bodies: reads bodies.
        watch: watches streams.
        tracer: begins the traces of requests; None: they are not traced.
        fallbacks: models that answer in place of others.
    """

    models: Models
    bodies: BodyReader
    watch: StreamWatch
    tracer: Tracer | None = None
    fallbacks: Fallbacks = field(default_factory=Fallbacks)

    def routes(self) -> list[Route]:
        """The routes that these handlers answer."""
        chat = {"model": "NAME", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        return [
            Route(
                method="POST",
                path="/v1/chat/completions",
                handler=self.chat,
                summary="Answers a chat.",
                body=ChatBody,
                example=chat,
                answer=ChatAnswer,
                event=ChatChunk,
            ),
            Route(
                method="POST",
                path="/v1/completions",
                handler=self.completion,
                summary="Completes prompts.",
                body=CompletionBody,
                example={"model": "NAME", "prompt": "The capital of France is", "max_tokens": 16},
                answer=CompletionAnswer,
                event=CompletionAnswer,
            ),
            Route(
                method="POST",
                path="/v1/responses",
                handler=self.response,
                summary="Answers an input.",
                body=ResponseBody,
                example={"model": "NAME", "input": "Hello", "max_output_tokens": 16},
                answer=Response,
                event=ResponseStreamEvent,
            ),
            Route(
                method="POST",
                path="/v1/messages",
                handler=self.message,
                summary="Answers a chat of Anthropic's API.",
                body=MessageBody,
                example=chat,
                answer=MessageAnswer,
                event=MessageEvent,
                failure=MessageError,
            ),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        body = await self.bodies.read(request, ChatBody)
        return await self._answer(request, body, "chatcmpl-", RequestReader.chat, ChatWriter)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        body = await self.bodies.read(request, CompletionBody)
        return await self._answer(request, body, "cmpl-", RequestReader.completion, CompletionWriter)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/responses`."""
        body = await self.bodies.read(request, ResponseBody)
        return await self._answer(request, body, "resp_", read_response, ResponseWriter)

    async def message(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/messages`."""
        body = await self.bodies.read(request, MessageBody)
        return await self._answer(request, body, "msg_", read_message, MessageWriter)

    async def _answer(
        self,
        request: web.Request,
        body: Body,
        prefix: str,
        read: Callable[[RequestReader, Body, str], AskedGeneration],
        make_writer: Callable[[Body, AskedGeneration, TokenTable, str], Writer],
    ) -> web.StreamResponse:
        answer_id = f"{prefix}{body.request_id or uuid.uuid4().hex}"
        with self._traced(request, body, answer_id) as trace:
            try:
                return await self._generate(request, body, answer_id, read, make_writer, trace)
            except NaiadError as error:
                # Whatever is raised comes before anything is sent.
                is_late = _is_late(request, body)
                other = None if is_late else self.fallbacks.after(body.model, error, self.models)
                if other is None:
                    raise
            body = msgspec.structs.replace(body, model=other)
            return await self._generate(request, body, answer_id, read, make_writer, trace)

    @contextlib.contextmanager
    def _traced(
        self, request: web.Request, body: SamplingBody, answer_id: str
    ) -> Iterator[RequestTrace | None]:
        """Follow a request until it has been answered, if it is to be traced."""
        parent = trace_of(request)
        trace = None
        if self.tracer is not None:
            # In front of a remote server only that server knows what its engine does.
            trace = self.tracer.begin(parent, request[BEGAN_S], shows_phases=self.models.observes)
        if trace is None:
            yield None
            return
        trace.name(COMPLETION if isinstance(body, CompletionBody) else CHAT, body.model, answer_id)
        try:
            yield trace
        except APIError as error:
            trace.fail(str(error.status), error.message)
            raise
        except NaiadError as error:
            trace.fail(error.status, str(error))
            raise
        except asyncio.CancelledError:
            trace.fail(*_CLIENT_GONE)
            raise
        except Exception as error:
            trace.fail(InternalError.status, type(error).__name__)
            raise
        finally:
            trace.end()

    async def _generate(
        self,
        request: web.Request,
        body: Body,
        answer_id: str,
        read: Callable[[RequestReader, Body, str], AskedGeneration],
        make_writer: Callable[[Body, AskedGeneration, TokenTable, str], Writer],
        trace: RequestTrace | None,
    ) -> web.StreamResponse:
        model = self.models.get(body.model)
        loaded = await model.loaded()
        caller, context = caller_of(request), trace_of(request) if trace is None else trace.context
        loop = asyncio.get_running_loop()

        def read_as_caller(reader: RequestReader) -> AskedGeneration:
            asked = replace(read(reader, body, answer_id), context=context, trace=trace)
            if body.timeout_s is not None:
                left_s = max(_left_s(request, body.timeout_s), _SOON_S)
                asked = replace(asked, request=replace(asked.request, timeout_s=left_s))
            if trace is not None:
                trace.submit(asked.request, loaded.info.checkpoint.served_name)
            if caller is None:
                return asked
            owned = caller.own(asked, body.priority)
            # Here, so that a client that leaves at once pays as well.
            if _CHARGED not in request:
                request[_CHARGED] = True
                loop.call_soon_threadsafe(caller.meter.charge, owned.request.num_prompt_tokens)
            return owned

        async with self.bodies.turn(request):
            asked, generation = await model.begin(loaded, read_as_caller)
        tally = Tally(asked.request, drops_tokens=asked.drops_tokens)
        try:
            writer = make_writer(body, asked, loaded.tokenizer.table, answer_id)
            if body.stream:
                return await self._send_stream(request, generation, writer, tally)
            raw = await _whole(generation, writer, tally)
        finally:
            generation.close()
            if trace is not None and not tally.is_complete:
                trace.fail(*_CLIENT_GONE)
            if caller is not None:
                caller.meter.charge(tally.usage.completion_tokens)
        return await self.watch.answer(request, raw)

    async def _send_stream(
        self, request: web.Request, generation: Generation, writer: Writer, tally: Tally
    ) -> web.StreamResponse:
        stream = EventStream(request, generation.nudge)
        await generation.started(_ADMISSION_S)
        # The client may be gone; then nobody is left to be told.
        with contextlib.suppress(ConnectionResetError):
            await stream.open()
            self.watch.streams.add(stream)
            try:
                await _stream(generation, writer, tally, stream)
            finally:
                self.watch.streams.discard(stream)
        return stream.response


def _is_late(request: web.Request, body: SamplingBody) -> bool:
    """Whether the time that a request has set itself has passed."""
    return body.timeout_s is not None and _left_s(request, body.timeout_s) <= 0


def _left_s(request: web.Request, timeout_s: float) -> float:
    """What is left of a request's time, which began with its headers."""
    return timeout_s - (time.monotonic() - request[BEGAN_S])


async def _whole(generation: Generation, writer: Writer, tally: Tally) -> bytes:
    while not tally.is_complete:
        for delta in await generation.next():
            tally.keep(delta)
    if tally.describes_tokens:
        # Writing this would hold up the event loop.
        return await asyncio.to_thread(lambda: encode(writer.whole(tally)))
    return encode(writer.whole(tally))


async def _stream(generation: Generation, writer: Writer, tally: Tally, stream: EventStream) -> None:
    """Write all events of a generation; an error ends the stream early."""
    opening = _framed(writer.opening(tally))
    if opening:
        await stream.write(opening)
    while not tally.is_complete:
        try:
            deltas = await generation.next()
        except NaiadError as error:
            await stream.write(_framed(writer.failed(api_error_of(error))))
            return
        if not deltas:
            await stream.comment()
            continue
        events = b""
        for delta in deltas:
            tally.take(delta)
            make_events = partial(_framed_chunks, writer, delta, tally)
            events += await asyncio.to_thread(make_events) if delta.output.prompt_log_probs else make_events()
        if tally.is_complete:
            events += _framed(writer.closing(tally)) + (DONE if writer.ends_with_done else b"")
        if events:
            await stream.write(events)


def _framed_chunks(writer: Writer, delta: SequenceDelta, tally: Tally) -> bytes:
    return _framed(writer.chunks(delta, tally))


def _framed(events: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(
        event(encode(each), each.event_name if isinstance(each, NamedEvent) else "") for each in events
    )
