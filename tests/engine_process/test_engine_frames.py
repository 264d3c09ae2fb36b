from __future__ import annotations

import socket
import struct
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.engine_process import protocol
from naiad.engine_process.protocol import (
    AddRequests,
    StepDone,
    client_message_decoder,
    encode_frame,
    engine_message_decoder,
    split_outputs,
)
from naiad.frames import MAX_FRAME_BYTES, FrameBuffer, frame
from naiad.frontend.limits import MAX_LOGITS_BYTES
from naiad.outputs import EngineStats, RequestOutput, TokenLogProbs
from naiad.sequence import EngineRequest, FinishReason, SamplingParams, TextContext


@given(st.lists(st.lists(st.integers(0, 2**31 - 1)), max_size=5), st.integers(1, 40))
def test_frames_survive_every_cut_of_the_stream(outputs: list[list[int]], chunk_bytes: int) -> None:
    messages = [StepDone([RequestOutput(1, token_ids)], EngineStats()) for token_ids in outputs]
    stream = b"".join(encode_frame(message) for message in messages)
    buffer = FrameBuffer()
    bodies: list[bytes] = []
    for start in range(0, len(stream), chunk_bytes):
        bodies += buffer.feed(stream[start : start + chunk_bytes])
    assert [engine_message_decoder.decode(body) for body in bodies] == messages


def test_a_message_is_received_without_room_made_for_a_large_one() -> None:
    """Else what is left of each in the C library's memory makes a process grow for hours."""
    here, there = socket.socketpair()
    with here, there:
        buffer = FrameBuffer()
        there.sendall(frame(b"first"))
        assert buffer.receive(here) == [b"first"]
        tracemalloc.start()
        try:
            for number in range(20):
                body = bytes([number]) * 1000
                there.sendall(frame(body) + frame(body)[:100])
                assert buffer.receive(here) == [body]
                there.sendall(frame(body)[100:])
                assert buffer.receive(here) == [body]
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 32_000
        there.shutdown(socket.SHUT_WR)
        assert buffer.receive(here) is None


def test_a_large_frame_is_received_in_several_reads() -> None:
    here, there = socket.socketpair()
    body, buffer = bytes(range(256)) * 4000, FrameBuffer()
    bodies: list[bytes] = []
    with here, there:
        sender = threading.Thread(target=there.sendall, args=(frame(body) + frame(b""),))
        sender.start()
        while len(bodies) < 2:
            found = buffer.receive(here)
            assert found is not None
            bodies += found
        sender.join()
    assert bodies == [body, b""]


def test_request_survives_the_wire() -> None:
    params = SamplingParams(max_tokens=3, seed=2**64 - 1, stop_sequences=((1, 2), (3,)))
    text = TextContext(stop_strings=("é",), prompt_tail_ids=(5, 6))
    request = EngineRequest(
        sequence_id=2**63, prompt_token_ids=[1, 2], params=params, text=text, timeout_s=0.5
    )
    (body,) = FrameBuffer().feed(encode_frame(AddRequests([request])))
    assert client_message_decoder.decode(body) == AddRequests([request])


def test_finish_survives_the_wire() -> None:
    output = RequestOutput(
        1, [], finish_reason=FinishReason.ERROR, error_status="INTERNAL", error_message="x"
    )
    (body,) = FrameBuffer().feed(encode_frame(StepDone([output], EngineStats(num_running=3))))
    assert engine_message_decoder.decode(body) == StepDone([output], EngineStats(num_running=3))


def test_oversized_frame_is_refused_before_it_arrives() -> None:
    with pytest.raises(ValueError, match="at most"):
        FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=64))
def test_garbage_is_a_decode_error_and_nothing_else(body: bytes) -> None:
    try:
        message = client_message_decoder.decode(body)
    except msgspec.DecodeError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([0, 0, 0], [[0, 0, 0]]),
        ([4, 6, 0], [[4, 6, 0]]),
        ([4, 7, 3, 1], [[4], [7, 3], [1]]),
        ([10, 10, 0], [[10], [10, 0]]),
        ([12, 0], [[12], [0]]),
    ],
)
def test_a_steps_logits_are_cut_into_messages(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(protocol, "MAX_LOGITS_BYTES", 10)
    outputs = [
        RequestOutput(
            index, [7], context_logits=bytes(size // 2), generation_logits=[bytes(size - size // 2)]
        )
        for index, size in enumerate(sizes)
    ]
    parts = split_outputs(outputs)
    assert [output for part in parts for output in part] == outputs
    assert [[sizes[output.sequence_id] for output in part] for part in parts] == expected


def test_log_probs_of_prompts_count_as_the_bytes_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    described = [TokenLogProbs(-1.5, list(range(100_000, 100_020)), [-2.5] * 20, 100_000)] * 50
    output = RequestOutput(1, [7], prompt_log_probs=described)
    num_bytes = len(msgspec.msgpack.encode(described))
    for most, num_messages in ((num_bytes - 1, 3), (10 * num_bytes, 1)):
        monkeypatch.setattr(protocol, "MAX_LOGITS_BYTES", most)
        assert len(split_outputs([output] * 3)) == num_messages


def test_the_largest_request_fits_a_message() -> None:
    assert MAX_LOGITS_BYTES <= protocol.MAX_LOGITS_BYTES < MAX_FRAME_BYTES


def test_oversized_body_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("naiad.frames.MAX_FRAME_BYTES", 8)
    assert frame(b"12345678") == struct.pack("<I", 8) + b"12345678"
    with pytest.raises(ValueError, match="a frame of 9 bytes; at most 8 are allowed"):
        frame(b"123456789")
