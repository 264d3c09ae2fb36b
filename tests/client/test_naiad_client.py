from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from naiad_client import Client, ServerError
from naiad_client.__main__ import main

Answer = Callable[[Any, Any], Iterator[Any]]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answer: Answer = lambda request, context: iter(())
        self.was_cancelled = threading.Event()
        self.url = ""

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        context.add_callback(self.was_cancelled.set)
        for request in request_iterator:
            self.requests.append(request)
            yield from self.answer(request, context)

    def sent(self) -> dict[str, tuple[str, list[int], bytes]]:
        request = self.requests[-1]
        return {
            tensor.name: (tensor.datatype, list(tensor.shape), content)
            for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    host = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, host)
    fake.url = f"127.0.0.1:{host.add_insecure_port('127.0.0.1:0')}"
    host.start()
    yield fake
    host.stop(grace=None).wait()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


def response(text: str | None = None, *, final: bool = False, finish: str = "", tokens: int = 1) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    answer = message.infer_response
    answer.parameters["triton_final_response"].bool_param = final
    if text is not None:
        raws = {"text_output": text.encode(), "finish_reason": finish.encode()}
        for name, raw in raws.items():
            answer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
            answer.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        for name, value in (("num_output_tokens", tokens), ("num_input_tokens", 5)):
            answer.outputs.add(name=name, datatype="INT32", shape=[1, 1])
            answer.raw_output_contents.append(struct.pack("<i", value))
    return message


def words(*texts: str) -> Answer:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        for text in texts[:-1]:
            yield response(text)
        yield response(texts[-1], finish="stop")
        yield response(final=True)

    return answer


def failure(message: str) -> Answer:
    return lambda request, context: iter([service_pb2.ModelStreamInferResponse(error_message=message)])


def test_chunks_come_in_order(server: FakeServer, client: Client) -> None:
    server.answer = words("Pa", "ris", "", " 🇫🇷")

    assert [chunk.text for chunk in client.generate("?")] == ["Pa", "ris", "", " 🇫🇷"]


def test_finish_reason_is_only_on_the_last_chunk(server: FakeServer, client: Client) -> None:
    server.answer = words("a", "b")

    assert [chunk.finish_reason for chunk in client.generate("?")] == [None, "stop"]


def test_token_counts_are_read(server: FakeServer, client: Client) -> None:
    server.answer = lambda request, context: iter([response("ab", tokens=3, final=True)])

    (chunk,) = client.generate("?")

    assert (chunk.num_output_tokens, chunk.num_input_tokens) == (3, 5)


def test_iteration_ends_at_the_final_response_not_at_the_stream_end(
    server: FakeServer, client: Client
) -> None:
    gate = threading.Event()

    def answer(request: Any, context: Any) -> Iterator[Any]:
        yield response("a", final=True)
        gate.wait(30)

    server.answer = answer
    assert len(list(client.generate("?"))) == 1
    assert not gate.is_set()
    gate.set()


def test_only_what_was_set_is_sent(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(
        client.generate(
            "?",
            return_finish_reason=None,
            return_num_input_tokens=None,
            return_num_output_tokens=None,
        )
    )

    assert set(server.sent()) == {"text_input", "max_tokens", "stream"}


def test_tensors_have_the_reference_types(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(client.generate("hé", max_tokens=7, temperature=0, top_k=3, top_p=0.5, seed=2**63, ignore_eos=True))

    sent = server.sent()
    assert sent["text_input"] == ("BYTES", [1, 1], b"\x03\0\0\0h\xc3\xa9")
    assert sent["max_tokens"] == ("INT32", [1, 1], struct.pack("<i", 7))
    assert sent["temperature"] == ("FP32", [1, 1], struct.pack("<f", 0))
    assert sent["top_k"] == ("INT32", [1, 1], struct.pack("<i", 3))
    assert sent["top_p"] == ("FP32", [1, 1], struct.pack("<f", 0.5))
    assert sent["seed"] == ("UINT64", [1, 1], struct.pack("<Q", 2**63))
    assert sent["ignore_eos"] == ("BOOL", [1, 1], b"\1")


def test_words_are_one_row(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(client.generate("?", stop_words=["x", "yz"], bad_words=["x"]))

    assert server.sent()["stop_words"] == ("BYTES", [1, 2], b"\1\0\0\0x\2\0\0\0yz")
    assert server.sent()["bad_words"] == ("BYTES", [1, 1], b"\1\0\0\0x")


def test_min_p_and_cache_salt_have_their_types(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(client.generate("?", min_p=0.5, cache_salt="me"))

    assert server.sent()["min_p"] == ("FP32", [1, 1], struct.pack("<f", 0.5))
    assert server.sent()["cache_salt"] == ("BYTES", [1, 1], b"\2\0\0\0me")


def test_a_chat_is_sent_as_messages(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(client.generate([{"role": "user", "content": "Hallo"}]))

    sent = server.sent()
    assert json.loads(sent["messages"][2][4:]) == [{"role": "user", "content": "Hallo"}]
    assert "text_input" not in sent


def test_an_empty_final_response_is_asked_for(server: FakeServer, client: Client) -> None:
    server.answer = words("a")
    list(client.generate("?", request_id="r1"))

    request = server.requests[-1]
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert (request.model_name, request.id) == ("ensemble", "r1")


def test_the_servers_error_is_raised(server: FakeServer, client: Client) -> None:
    server.answer = failure("max_tokens = 0: expected a finite number ≥ 1")

    with pytest.raises(ServerError, match="max_tokens = 0: expected a finite number ≥ 1"):
        list(client.generate("?", max_tokens=0))


def test_an_error_after_text_is_raised_after_the_text(server: FakeServer, client: Client) -> None:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        yield response("a")
        yield from failure("the engine was lost")(request, context)

    server.answer = answer
    generation = client.generate("?")
    assert next(generation).text == "a"
    with pytest.raises(ServerError, match="the engine was lost"):
        next(generation)


@pytest.mark.parametrize("way", ["cancel", "close", "with", "drop"])
def test_leaving_early_cancels_the_stream(server: FakeServer, client: Client, way: str) -> None:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        while context.is_active():
            yield response("a")
            server.was_cancelled.wait(0.01)

    server.answer = answer
    generation = client.generate("?")
    next(generation)
    if way == "with":
        with generation:
            pass
    elif way == "drop":
        del generation
    else:
        getattr(generation, way)()

    assert server.was_cancelled.wait(10)


def test_no_chunk_comes_after_a_cancel(server: FakeServer, client: Client) -> None:
    server.answer = words("a", "b", "c")
    generation = client.generate("?")
    next(generation)
    generation.cancel()

    assert list(generation) == []


def test_many_generations_share_a_client(server: FakeServer, client: Client) -> None:
    server.answer = words("a", "b")
    running = [client.generate("?") for _ in range(4)]

    assert ["".join(chunk.text for chunk in each) for each in running] == ["ab"] * 4


def test_cancel_by_request_id_asks_the_token_model(server: FakeServer, client: Client) -> None:
    server.answer = lambda request, context: iter([response(final=True)])
    client.cancel("r7")

    assert (server.requests[-1].model_name, server.requests[-1].id) == ("llm", "r7")
    assert server.sent()["stop"] == ("BOOL", [1, 1], b"\1")


def test_a_value_that_does_not_fit_is_refused_before_sending(server: FakeServer, client: Client) -> None:
    with pytest.raises(ValueError, match="max_tokens = 4294967298"):
        client.generate("?", max_tokens=2**32 + 2)

    assert server.requests == []


def test_a_server_that_is_not_there_is_named() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ServerError, match=r"127\.0\.0\.1:1") as caught:
        list(client.generate("?"))

    assert caught.value.status == "UNAVAILABLE"


def test_command_prints_the_text(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = words("Par", "is")

    assert main(["capital?", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Paris\n"


def test_command_prints_figures_on_stderr(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = words("a", "b", "c")
    main(["?", "--url", server.url])

    summary = capsys.readouterr().err
    assert summary.startswith("3 tokens, ")
    assert "tokens/s" in summary
    assert "first token after" in summary


def test_command_passes_its_options_on(server: FakeServer) -> None:
    server.answer = words("a")
    options = ["--chat", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9"]
    options += ["--min-p", "0.1"]
    main(
        ["?", *options, "--seed", "3", "--stop", "x", "--stop", "y", "--url", server.url, "--model", "other"]
    )

    sent = server.sent()
    assert server.requests[-1].model_name == "other"
    assert sent.keys() >= {"messages", "temperature", "top_k", "top_p", "min_p", "seed"}
    assert sent["max_tokens"][2] == struct.pack("<i", 9)
    assert sent["stop_words"][1] == [1, 2]


def test_command_fails_in_one_line_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["?", "--url", "127.0.0.1:1"]) == 1

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "127.0.0.1:1" in error


def test_command_fails_with_the_servers_message(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = failure("the prompt is empty")

    assert main(["?", "--url", server.url]) == 1
    assert capsys.readouterr().err == "error: the prompt is empty\n"


def test_command_puts_an_error_after_text_on_a_line_of_its_own(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        yield response("Par")
        yield from failure("the engine was lost")(request, context)

    server.answer = answer

    assert main(["?", "--url", server.url]) == 1
    assert capsys.readouterr().out == "Par\n"


def test_command_ends_quietly_when_its_reader_is_gone(server: FakeServer) -> None:
    server.answer = words(*("a" * 100 for _ in range(2000)))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "naiad_client", "?", "--url", server.url],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (1, "")
