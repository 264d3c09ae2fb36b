from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_naiad_server import FakeServer, failure, response, words
from naiad_client import Client, ServerError


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
