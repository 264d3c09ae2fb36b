"""The public gRPC port: messages are checked and sent on as bytes, and so are the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from naiad.gate.grpc_messages import check_infer_request, error_in_stream
from naiad.gate.grpc_methods import REFUSED_METADATA, MethodKind, refusal_of
from naiad.gate.headers import passed_headers
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError

_LOOK_S = 1.0
_UNLIMITED = -1
_MAX_METADATA_BYTES = 16 << 10
_MAX_STREAMS_OF_A_CONNECTION = 256
_IDLE_MS = 300_000


class StreamCall:
    """A stream of one client.

    Attributes:
        writes_since_s: since when a message waits until the client reads; None: none waits.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        """Set up; the task serves it."""
        self.writes_since_s: float | None = None
        self._task = task

    def cancel(self) -> None:
        """End it."""
        self._task.cancel()


class GRPCDoor:
    """The port.

    Attributes:
        num_refused: number of requests that did not pass.
        num_slow_readers: number of streams ended because their client did not read.
    """

    def __init__(self, methods: Mapping[str, MethodKind], server: str, limits: Limits) -> None:
        """Set up.

        Args:
            methods: path of a method → how it passes.
            server: HOST:PORT of the server behind it.
            limits: the limits.
        """
        self.num_refused = self.num_slow_readers = 0
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._calls: set[StreamCall] = set()
        sizes = [
            ("grpc.max_receive_message_length", _UNLIMITED),
            ("grpc.max_send_message_length", _UNLIMITED),
        ]
        self._channel = grpc.aio.insecure_channel(server, options=sizes)
        self._server = grpc.aio.server(
            handlers=[
                _Handlers({path: self._handler(path, kind) for path, kind in methods.items()}, self._refuse)
            ],
            options=[
                ("grpc.max_receive_message_length", limits.max_body_bytes),
                ("grpc.max_send_message_length", _UNLIMITED),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", _MAX_STREAMS_OF_A_CONNECTION),
                ("grpc.max_allowed_incoming_connections", limits.max_connections),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server_handshake_timeout_ms", int(1e3 * limits.head_s)),
                # A second server would share the port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=limits.max_connections,
        )

    async def listen(self, host: str, port: int) -> int:
        """Accept connections from now on; return the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(None, str(error)) from None
        await self._server.start()
        return port

    async def watch(self) -> None:
        """End the streams of clients that do not read; runs for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for call in [*self._calls]:
                since_s = call.writes_since_s
                if since_s is not None and self._loop.time() - since_s > self._limits.slow_reader_s:
                    self.num_slow_readers += 1
                    call.cancel()

    async def close(self, patience_s: float) -> None:
        """Accept nothing more, and give running calls some seconds."""
        await self._server.stop(patience_s)
        await self._channel.close()

    def _handler(self, path: str, kind: MethodKind) -> Any:
        if kind == "stream":
            upstream = self._channel.stream_stream(path)

            async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
                await self._serve_stream(upstream, requests, context)

            return grpc.stream_stream_rpc_method_handler(stream)
        ask = self._channel.unary_unary(path)

        async def unary(request: bytes, context: Any) -> bytes:
            return await self._serve_unary(ask, request, context, checks=kind == "infer")

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _refuse(self, context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
        self.num_refused += 1
        await context.abort(code, message)
        raise AssertionError

    async def _metadata(self, context: Any) -> tuple[tuple[str, str], ...]:
        """Return the metadata to send on."""
        sent = context.invocation_metadata() or ()
        if any(key == REFUSED_METADATA for key, _ in sent):
            message = (
                f"the header {REFUSED_METADATA} does not pass the gate: a stream has errors in its messages"
            )
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)
        return passed_headers(sent)

    async def _serve_unary(self, ask: Any, request: bytes, context: Any, *, checks: bool) -> bytes:
        metadata = await self._metadata(context)
        if checks:
            try:
                check_infer_request(request, self._limits)
            except RefusedError as refusal:
                await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        call = ask(request, timeout=context.time_remaining(), metadata=metadata)
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            await _abort_as(context, error)
        context.set_trailing_metadata(tuple(await call.trailing_metadata()))
        return answer

    async def _serve_stream(self, open_stream: Any, requests: AsyncIterator[bytes], context: Any) -> None:
        upstream = open_stream(timeout=context.time_remaining(), metadata=await self._metadata(context))
        task = asyncio.current_task()
        assert task is not None
        call = StreamCall(task)
        self._calls.add(call)
        writing = asyncio.Lock()

        async def write(message: bytes) -> None:
            async with writing:
                call.writes_since_s = self._loop.time()
                await context.write(message)
                call.writes_since_s = None

        sender = asyncio.create_task(self._send_on(requests, upstream, write))
        try:
            while (message := await upstream.read()) is not grpc.aio.EOF:
                await write(message)
            context.set_trailing_metadata(tuple(await upstream.trailing_metadata() or ()))
        except grpc.aio.AioRpcError as error:
            await _abort_as(context, error)
        finally:
            self._calls.discard(call)
            sender.cancel()
            upstream.cancel()

    async def _send_on(
        self, requests: AsyncIterator[bytes], upstream: Any, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send a client's messages to the server; one that does not pass is refused, and the others go on."""
        # The server has ended the stream, and its status says why; or the client is gone.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
            async for raw in requests:
                try:
                    check_infer_request(raw, self._limits)
                except RefusedError as refusal:
                    self.num_refused += 1
                    await write(error_in_stream(raw, str(refusal)))
                else:
                    await upstream.write(raw)
            await upstream.done_writing()


async def _abort_as(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    """End a call as the server has ended it."""
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    raise AssertionError


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method; one that is not in the table is refused by name."""

    def __init__(self, handlers: Mapping[str, Any], refuse: Callable[..., Awaitable[None]]) -> None:
        self._handlers = handlers
        self._refuse = refuse

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler."""
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is not None:
            return found

        async def refuse(_requests: AsyncIterator[bytes], context: Any) -> None:
            await self._refuse(
                context, grpc.StatusCode.UNIMPLEMENTED, f"{method[:200]}: {refusal_of(method)}"
            )

        return grpc.stream_stream_rpc_method_handler(refuse)
