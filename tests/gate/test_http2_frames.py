"""Frames, header blocks, windows and gRPC messages, each by itself."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hpack import Decoder, Encoder

from naiad.gate import http2_frames as http2
from naiad.gate.answer_window import READING_BYTES, AnswerWindow
from naiad.gate.grpc_framing import PREFIX, MessageBoundary, MessageReader, framed
from naiad.gate.grpc_status import GRPCRefusedError, Status, trailers
from naiad.gate.header_blocks import MAX_BLOCK_BYTES, Block, BlockDecoder, encode
from naiad.gate.http2_frames import ConnectionFaultError, Frame, FrameReader

FRAMES = (
    http2.settings({http2.INITIAL_WINDOW_SIZE: 7})
    + http2.frame(http2.DATA, http2.END_STREAM, 3, b"abc")
    + http2.frame(http2.PING, 0, 0, bytes(8))
    + http2.frame(http2.DATA, 0, 5, bytes(http2.MAX_FRAME_BYTES))
)
FIELDS = ((b":status", b"200"), (b"a", b"x" * 126), (b"b", b"y" * 127), (b"c", b"z" * 5000))


@pytest.mark.parametrize("step", [1, 2, 9, 10, 1000, 1 << 20])
def test_every_cut_gives_the_same_frames(step: int) -> None:
    raw = http2.PREFACE + FRAMES
    reader = FrameReader()
    found = [each for at in range(0, len(raw), step) for each in reader.frames(raw[at : at + step])]
    assert [(each.kind, each.flags, each.stream_id, len(each.payload)) for each in found] == [
        (http2.SETTINGS, 0, 0, 6),
        (http2.DATA, http2.END_STREAM, 3, 3),
        (http2.PING, 0, 0, 8),
        (http2.DATA, 0, 5, http2.MAX_FRAME_BYTES),
    ]
    assert not reader.is_within_frame


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"GET / HTTP/1.1\r\n", http2.PROTOCOL_ERROR),
        (http2.PREFACE + b"\0\x40\1\0\0\0\0\0\1", http2.FRAME_SIZE_ERROR),
    ],
)
def test_what_is_no_frame_is_refused_as_soon_as_it_is_seen(raw: bytes, code: int) -> None:
    with pytest.raises(ConnectionFaultError) as fault:
        list(FrameReader().frames(raw))
    assert fault.value.code == code


@pytest.mark.parametrize(
    ("flags", "payload", "content"),
    [
        (0, b"abc", b"abc"),
        (http2.PADDED, b"\2abc\0\0", b"abc"),
        (http2.PADDED, b"\0abc", b"abc"),
        (http2.PADDED | http2.HAS_PRIORITY, b"\1\0\0\0\0\7abc\0", b"abc"),
        (http2.PADDED, b"\3abc", b""),
        (http2.PADDED, b"\4abc", None),
        (http2.PADDED, b"", None),
        (http2.HAS_PRIORITY, b"abcd", None),
    ],
)
def test_padding_and_priority_are_taken_off(flags: int, payload: bytes, content: bytes | None) -> None:
    each = Frame(http2.HEADERS, flags, 1, payload)
    if content is None:
        with pytest.raises(ConnectionFaultError):
            http2.content(each)
    else:
        assert http2.content(each) == content


def test_a_block_of_the_gate_uses_no_table() -> None:
    encoded = encode(FIELDS)
    decoder = Decoder(max_header_list_size=1 << 16)
    assert [(bytes(n), bytes(v)) for n, v in decoder.decode(encoded, raw=True)] == list(FIELDS)
    assert decoder.header_table.dynamic_entries == type(decoder.header_table.dynamic_entries)()


def test_a_block_may_come_in_several_frames() -> None:
    encoded = Encoder().encode(FIELDS)
    first = Frame(http2.HEADERS, http2.END_STREAM, 1, encoded[:10])
    block = Block(first)
    block.add(Frame(http2.CONTINUATION, 0, 1, encoded[10:20]))
    assert not block.is_complete
    block.add(Frame(http2.CONTINUATION, http2.END_HEADERS, 1, encoded[20:]))
    assert (block.is_complete, block.ends_stream) == (True, True)
    assert BlockDecoder().decode(block.encoded) == FIELDS


@pytest.mark.parametrize(
    "more",
    [
        [Frame(http2.CONTINUATION, 0, 3, b"")],
        [Frame(http2.CONTINUATION, 0, 1, bytes(16_000))] * 3,
        [Frame(http2.CONTINUATION, 0, 1, b"")] * 9,
    ],
)
def test_a_block_has_limits(more: list[Frame]) -> None:
    block = Block(Frame(http2.HEADERS, 0, 1, b""))
    for each in more[:-1]:
        block.add(each)
    with pytest.raises(ConnectionFaultError):
        block.add(more[-1])


@pytest.mark.parametrize(
    "encoded",
    [
        b"\x80",
        b"\xff\xff\xff\xff\xff\xff\xff",
        b"\0\x7f",
        b"\x3f\xe1\xff\x03",
        # One entry of the table, named over and over.
        b"\x40\x01a\x7f\x81\x1e" + b"x" * 3968 + b"\xbe" * 100,
    ],
)
def test_a_block_that_can_not_be_decoded_is_refused(encoded: bytes) -> None:
    assert len(encoded) < MAX_BLOCK_BYTES
    with pytest.raises(ConnectionFaultError) as fault:
        BlockDecoder().decode(encoded)
    assert fault.value.code == http2.COMPRESSION_ERROR


def test_a_status_message_is_quoted() -> None:
    assert dict(trailers(Status.UNIMPLEMENTED, "a b%\n\u00fc"))[b"grpc-message"] == b"a b%25%0A%C3%BC"


def test_a_window_keeps_from_the_server_what_the_gate_has_used() -> None:
    window = AnswerWindow(100, 100)
    window.client -= 30
    window.grant(25)
    assert (window.client, window.server, window.take_owed()) == (95, 100, 0)
    window.grant(10)
    assert (window.take_owed(), window.take_owed(), window.server) == (5, 0, 105)


def test_a_window_keeps_from_the_server_what_it_has_sent_already() -> None:
    window = AnswerWindow(100, 60)
    assert (window.take_owed(50), window.take_owed(30), window.server) == (0, 10, 70)


def test_a_window_has_a_largest_size() -> None:
    window = AnswerWindow(1, 1)
    with pytest.raises(ConnectionFaultError):
        window.grant(http2.MAX_WINDOW)


def test_a_reader_is_slow_until_it_has_read_enough() -> None:
    window = AnswerWindow(1, 1)
    assert window.waited_s(0.0) == 0.0
    window.client = 0
    assert (window.waited_s(1.0), window.waited_s(3.0)) == (0.0, 2.0)
    window.grant(10)
    window.client = 0
    assert window.waited_s(4.0) == 3.0
    window.grant(READING_BYTES)
    window.client = 0
    assert window.waited_s(5.0) == 0.0
    window.client = 1
    assert window.waited_s(9.0) == 0.0
    window.client = 0
    assert window.waited_s(10.0) == 0.0


@pytest.mark.parametrize("step", [1, 3, 5, 6, 1000])
def test_messages_are_collected_however_they_are_cut(step: int) -> None:
    messages = [b"", b"abc", bytes(300), b""]
    raw = b"".join(framed(each) for each in messages)
    reader = MessageReader("identity", 300)
    found = []
    for at in range(0, len(raw), step):
        reader.add(raw[at : at + step], 1.0)
        while (message := reader.next()) is not None:
            found.append(reader.inflated(message))
    assert (found, reader.num_bytes, reader.since_s) == (messages, 0, None)
    reader.check_end()


@pytest.mark.parametrize(
    ("encoding", "raw", "expected"),
    [
        ("gzip", gzip.compress(b"abc" * 30, mtime=0), b"abc" * 30),
        ("deflate", zlib.compress(b"abc" * 30), b"abc" * 30),
        ("gzip", gzip.compress(bytes(101), mtime=0), Status.RESOURCE_EXHAUSTED),
        ("gzip", gzip.compress(b"a", mtime=0) + b"x", Status.INTERNAL),
        ("gzip", gzip.compress(b"a", mtime=0)[:-3], Status.INTERNAL),
        ("gzip", b"abc", Status.INTERNAL),
        ("identity", b"abc", Status.INTERNAL),
    ],
)
def test_compressed_messages_are_inflated_up_to_the_limit(
    encoding: str, raw: bytes, expected: bytes | Status
) -> None:
    reader = MessageReader(encoding, 100)
    reader.add(PREFIX.pack(1, len(raw)) + raw, 0.0)
    message = reader.next()
    assert message is not None
    assert message == (raw, True)
    if isinstance(expected, bytes):
        assert reader.inflated(message) == expected
    else:
        with pytest.raises(GRPCRefusedError) as refusal:
            reader.inflated(message)
        assert refusal.value.grpc_status == expected


@pytest.mark.parametrize("raw", [PREFIX.pack(2, 0), PREFIX.pack(0, 101)])
def test_a_prefix_that_can_not_be_is_refused_before_the_message_comes(raw: bytes) -> None:
    reader = MessageReader("identity", 100)
    reader.add(raw, 0.0)
    with pytest.raises(GRPCRefusedError):
        reader.next()


def test_a_boundary_is_known_however_the_answer_is_cut() -> None:
    draw = random.Random(3)
    for _ in range(200):
        messages = [bytes(draw.choice((0, 1, 7, 300))) for _ in range(draw.randrange(1, 6))]
        raw = b"".join(framed(each) for each in messages)
        ends, at = set(), 0
        for each in messages:
            at += PREFIX.size + len(each)
            ends.add(at)
        boundary, at = MessageBoundary(), 0
        assert boundary.is_here
        while at < len(raw):
            end = min(len(raw), at + draw.choice((1, 2, 5, 6, 12, 305, 400)))
            boundary.follow(raw, at, end)
            assert boundary.is_here == (end in ends), (messages, at, end)
            at = end
