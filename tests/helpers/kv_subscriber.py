"""A router's side of KV events, written from what vLLM documents of them and from nothing of ours."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

# As vLLM 0.33 has them: EventBatch is an array, its events are maps with their class's name under "type".


class BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


Hash = int | bytes


class Router:
    """What a router knows of one engine.

    Attributes:
        blocks: hash → the hash of the block before it, and the block's tokens.
        num_clears: how often the cache was said to be empty.
    """

    def __init__(self) -> None:
        self.blocks: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.num_clears = 0

    def take(self, payload: bytes) -> EventBatch:
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for each in event.block_hashes:
                        del self.blocks[each]
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.num_clears += 1
        return batch

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert parent is None or parent in self.blocks, "a block follows one that is not there"
        for index, each in enumerate(event.block_hashes):
            assert each not in self.blocks, "a block is stored twice"
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            assert len(tokens) in (0, event.block_size)
            self.blocks[each] = parent, tuple(tokens)
            parent = each


class Subscriber:
    """A SUB socket whose messages go to a router.

    Attributes:
        router: what the messages told.
        numbers: the sequence numbers that came.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str = "", max_unread: int = 1000
    ) -> None:
        self.router = Router()
        self.numbers: list[int] = []
        self.topic = topic
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, max_unread)
        # So that the kernel keeps little for those who do not read.
        self.socket.setsockopt(zmq.RCVBUF, 1 << 16)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(endpoint)

    def receive(self, timeout_s: float = 5.0) -> EventBatch | None:
        """Take one message; None: there is none."""
        if not self.socket.poll(round(1000 * timeout_s)):
            return None
        topic, number, payload = self.socket.recv_multipart()
        assert topic == self.topic.encode()
        self.numbers.append(struct.unpack(">Q", number)[0])
        return self.router.take(payload)

    def receive_until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Take messages until something holds."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, "the events did not come"
            self.receive(0.05)


def replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int, timeout_s: float = 5.0
) -> list[tuple[int, bytes]]:
    """Ask for the batches from a number on; returns numbers and payloads, without the end."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart((b"", struct.pack(">Q", first)))
        return read_replay(socket, timeout_s)


def read_replay(socket: zmq.Socket[bytes], timeout_s: float = 5.0) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while True:
        assert socket.poll(round(1000 * timeout_s)), "the replay has no end"
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert payload == b""
            return found
        found.append((struct.unpack(">Q", number)[0], payload))


def hashes(blocks: Sequence[Any]) -> set[Hash]:
    """The hashes under which blocks of the prefix cache are published."""
    return {int.from_bytes(block.digest[-8:], "big") for block in blocks}
