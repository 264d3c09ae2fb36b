"""What passes the gate's gRPC door, and how calls end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from naiad.gate.grpc_door import GRPCDoor
from naiad.gate.grpc_methods import INFERENCE, MODEL_CONTROL
from naiad.gate.limits import Limits

PATIENCE_S = 30.0
TRACE = f"00-{1:032x}-{2:016x}-01"
SERVICE = "/inference.GRPCInferenceService/"
STREAM, INFER = SERVICE + "ModelStreamInfer", SERVICE + "ModelInfer"
# Not what a message looks like: the gate must pass answers without reading them.
OPAQUE = b"\xff\xff not a message"


@dataclass
class FakeServer:
    """Answers every method: `model_name` says how."""

    calls: list[tuple[str, dict[str, Any], float | None]] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, details: Any) -> Any:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            metadata = {key: value for key, value in details.invocation_metadata if key != "user-agent"}
            self.calls.append((details.method, metadata, context.time_remaining()))
            has_ended = False
            try:
                async for raw in requests:
                    self.received.append(raw)
                    await self._answer(raw, context)
                has_ended = True
            finally:
                if not has_ended:
                    self.cancelled.set()

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _answer(self, raw: bytes, context: Any) -> None:
        name = service_pb2.ModelInferRequest.FromString(raw).model_name
        context.set_trailing_metadata((("said-last", "yes"),))
        if name == "error":
            await context.abort(grpc.StatusCode.ABORTED, "as the server says", (("why", "so"),))
        await context.write(OPAQUE)
        while name == "endless":
            await context.write(b"x" * 65_536)


@dataclass
class Setting:
    door: GRPCDoor
    port: int
    server: FakeServer
    channel: grpc.aio.Channel


def run(
    work: Callable[[Setting], Awaitable[None]], limits: Limits | None = None, *, has_control: bool = False
) -> None:
    async def inside() -> None:
        fake = FakeServer()
        server = grpc.aio.server(handlers=[fake])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        methods = {**INFERENCE, **(MODEL_CONTROL if has_control else {})}
        door = GRPCDoor(methods, f"127.0.0.1:{port}", limits or Limits())
        watch = asyncio.create_task(door.watch())
        door_port = await door.listen("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{door_port}") as channel:
            try:
                await asyncio.wait_for(work(Setting(door, door_port, fake, channel)), PATIENCE_S)
            finally:
                watch.cancel()
                await door.close(0.0)
                await server.stop(0.0)

    asyncio.run(inside())


def request(name: str = "m", **more: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name=name, **more)
    made.inputs.add(name="a", datatype="INT32", shape=[1, 1]).contents.int_contents.append(7)
    return made


def classifying() -> Any:
    made = request(id="bad")
    made.outputs.add(name="o").parameters["classification"].int64_param = 1
    return made


async def failure(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details() or ""


def test_every_method_of_triton_passes_or_is_refused_by_name() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert len(methods) == 20

    async def work(setting: Setting) -> None:
        for method in methods:
            path = SERVICE + method.name
            if path in INFERENCE:
                call = setting.channel.stream_stream(path)(iter([request().SerializeToString()]))
                assert [answer async for answer in call] == [OPAQUE], path
            else:
                code, text = await failure(setting.channel.unary_unary(path)(b""))
                assert code is grpc.StatusCode.UNIMPLEMENTED
                assert "does not let through" in text, path
        code, _ = await failure(setting.channel.unary_unary("/grpc.reflection.v1.ServerReflection/X")(b""))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert {path for path, *_ in setting.server.calls} == set(INFERENCE) - {
            "/grpc.health.v1.Health/Check"
        }

    run(work)


def test_model_control_passes_where_it_is_on() -> None:
    async def work(setting: Setting) -> None:
        key = ("triton-grpc-protocol-naiad-model-control-key", "a-key-of-20-letters.")
        for path in MODEL_CONTROL:
            assert await setting.channel.unary_unary(path)(b"", metadata=[key]) == b""
            assert setting.server.calls[-1][:2] == (path, dict([key]))

    # The fake server answers each message, and a call without one not at all.
    async def answered(setting: Setting) -> None:
        setting.server._answer = lambda _raw, context: context.write(b"")  # type: ignore[method-assign]
        await work(setting)

    run(answered, has_control=True)


def test_messages_pass_as_they_are_and_metadata_by_name() -> None:
    async def work(setting: Setting) -> None:
        # An unusual encoding of the same message stays what it is.
        raw = request().SerializeToString() + request().SerializeToString()
        metadata = (
            ("traceparent", TRACE),
            ("tracestate", "x" * 600),
            ("authorization", "Bearer x"),
            ("triton_x", "1"),
        )
        call = setting.channel.unary_unary(INFER)(raw, metadata=metadata)
        assert await call == OPAQUE
        assert ("said-last", "yes") in tuple(await call.trailing_metadata())
        assert (setting.server.received, setting.server.calls[0][1]) == ([raw], {"traceparent": TRACE})

    run(work)


def test_a_status_passes_with_its_details() -> None:
    async def work(setting: Setting) -> None:
        raw = request("error").SerializeToString()
        for call in (
            setting.channel.unary_unary(INFER)(raw),
            setting.channel.stream_stream(STREAM)(iter([raw])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await (call if hasattr(call, "__await__") else call.read())
            assert (failed.value.code(), failed.value.details()) == (
                grpc.StatusCode.ABORTED,
                "as the server says",
            )
            assert ("why", "so") in tuple(await call.trailing_metadata())

    run(work)


def test_a_refused_message_of_a_stream_leaves_the_others_alone() -> None:
    async def work(setting: Setting) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(setting.channel)
        bad, good = classifying(), request(id="good").SerializeToString()
        raws = iter([good, bad.SerializeToString(), b"\xff", good])
        answers = [each async for each in setting.channel.stream_stream(STREAM)(raws)]
        refusals = [
            service_pb2.ModelStreamInferResponse.FromString(each) for each in answers if each != OPAQUE
        ]
        assert [(each.infer_response.id, "class_count" in each.error_message) for each in refusals] == [
            ("bad", True),
            ("", False),
        ]
        assert all(each.infer_response.parameters["triton_final_response"].bool_param for each in refusals)
        assert (answers.count(OPAQUE), setting.server.received) == (2, [good, good])
        assert (await failure(stub.ModelInfer(bad)))[0] is grpc.StatusCode.INVALID_ARGUMENT

    run(work)


def _with_parameter(place: str, name: str) -> Any:
    made = request()
    made.outputs.add(name="o")
    holder = {"request": made, "input": made.inputs[0], "output": made.outputs[0]}[place]
    holder.parameters[name].int64_param = 1
    return made


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (_with_parameter("output", "classification"), "class_count"),
        (_with_parameter("output", "shared_memory_region"), "shared_memory_region"),
        (_with_parameter("input", "shared_memory_region"), "shared_memory_region"),
        (_with_parameter("request", "triton_x"), "triton_x"),
        (request(id="x" * 2000), "1024"),
        (service_pb2.ModelInferRequest(inputs=[{"name": str(n)} for n in range(300)]), "300 inputs"),
        (service_pb2.ModelInferRequest(outputs=[{"name": str(n)} for n in range(300)]), "300 outputs"),
        (service_pb2.ModelInferRequest(inputs=[{"shape": [1] * 9}]), "9 dimensions"),
    ],
)
def test_what_does_not_pass_is_named(message: Any, named: str) -> None:
    async def work(setting: Setting) -> None:
        code, text = await failure(setting.channel.unary_unary(INFER)(message.SerializeToString()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert named in text
        assert (setting.server.received, setting.door.num_refused) == ([], 1)

    run(work)


def test_the_header_that_kills_the_server_is_refused() -> None:
    async def work(setting: Setting) -> None:
        header = (("triton_grpc_error", "true"),)
        raw = request().SerializeToString()
        code, text = await failure(setting.channel.stream_stream(STREAM)(iter([raw]), metadata=header).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "triton_grpc_error" in text
        assert setting.server.calls == []

    run(work)


def test_large_messages_are_refused() -> None:
    async def work(setting: Setting) -> None:
        raw = request(raw_input_contents=[bytes(2000)]).SerializeToString()
        for call in (
            setting.channel.unary_unary(INFER)(raw),
            setting.channel.stream_stream(STREAM)(iter([raw])).read(),
        ):
            assert (await failure(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert setting.server.received == []

    run(work, Limits(max_body_bytes=1000))


def test_a_cancel_reaches_the_server() -> None:
    async def work(setting: Setting) -> None:
        call = setting.channel.stream_stream(STREAM)(iter([request("endless").SerializeToString()]))
        assert await call.read() == OPAQUE
        call.cancel()
        await setting.server.cancelled.wait()

    run(work)


def test_a_deadline_reaches_the_server() -> None:
    async def work(setting: Setting) -> None:
        call = setting.channel.unary_unary(INFER)(request("endless").SerializeToString(), timeout=3.0)
        assert (await failure(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await setting.server.cancelled.wait()
        left_s = setting.server.calls[0][2]
        assert left_s is not None
        assert left_s <= 3.1, "gRPC rounds a deadline up when it writes it, twice on this way"

    run(work)


def test_a_client_that_reads_nothing_gives_up_its_stream() -> None:
    async def work(setting: Setting) -> None:
        call = setting.channel.stream_stream(STREAM)(iter([request("endless").SerializeToString()]))
        await call.read()
        await setting.server.cancelled.wait()
        assert setting.door.num_slow_readers == 1

    run(work, Limits(slow_reader_s=0.2))


def test_calls_beyond_the_limit_are_refused() -> None:
    async def work(setting: Setting) -> None:
        raw = request("endless").SerializeToString()
        first = setting.channel.stream_stream(STREAM)(iter([raw]))
        await first.read()
        second = setting.channel.unary_unary(SERVICE + "ServerLive")(raw)
        assert (await failure(second))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()

    run(work, Limits(max_connections=1))


def test_a_server_that_is_away_is_told() -> None:
    async def work(setting: Setting) -> None:
        door = GRPCDoor(INFERENCE, "127.0.0.1:1", Limits())
        port = await door.listen("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, _ = await failure(channel.unary_unary(SERVICE + "ServerLive")(b""))
            assert code is grpc.StatusCode.UNAVAILABLE
        await door.close(0.0)

    run(work)


def test_a_port_in_use_is_told() -> None:
    async def work(setting: Setting) -> None:
        other = GRPCDoor(INFERENCE, "127.0.0.1:1", Limits())
        with contextlib.closing(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)) as listener:
            port = listener.sockets[0].getsockname()[1]
            with pytest.raises(OSError, match=str(port)):
                await other.listen("127.0.0.1", port)
        await other.close(0.0)

    run(work)


def test_connections_beyond_the_limit_are_closed() -> None:
    async def work(setting: Setting) -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", setting.port) for _ in range(3)]
        for _, writer in pairs:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        # A connection that is taken answers with its settings.
        answers = await asyncio.gather(*(reader.read(1) for reader, _ in pairs))
        assert sorted(answers) == [b"", b"\0", b"\0"]
        for _, writer in pairs:
            writer.close()

    run(work, Limits(max_connections=2))
