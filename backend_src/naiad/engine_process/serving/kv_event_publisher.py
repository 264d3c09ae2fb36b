"""Publishes what comes to the prefix cache and goes from it to routers, over ZeroMQ."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from naiad.config.kv_events import KVEventSettings, is_loopback_endpoint
from naiad.engine_process.serving.kv_event_messages import (
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
    events_of,
)
from naiad.errors import ConfigError, StartupError
from naiad.kv_cache.cache_log import CacheChange, CacheLog, ChangeKind

# Of a message: vllm-router refuses messages of more than 4,096 events or 16 MiB.
_MAX_CHANGES = 2000
# What a peer sends is a subscription or a number.
_MAX_RECEIVED_BYTES = 4096
_NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LINGER_MS = 200
_CLOSE_S = 1.0
_CATCH_UP_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """Bounds of what is kept.

    Attributes:
        max_pending: batches that the publisher's thread has not sent yet; further ones are dropped.
        max_behind: batches that ZeroMQ keeps for a subscriber; it drops further ones, for this one alone.
        max_replayed: batches that are kept for replays.
        max_replayed_bytes: their size.
    """

    max_pending: int = 10_000
    max_behind: int = 10_000
    max_replayed: int = 10_000
    max_replayed_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Pending:
    """Changes that wait for the thread; `is_whole`: they are the whole content of the cache."""

    ts: float
    changes: list[CacheChange]
    is_whole: bool = False


class KVEventPublisher:
    """Sends changes of the prefix cache to whoever subscribes.

    The engine's thread only appends lists: it never waits for a socket and never encodes anything. A thread
    of the publisher makes messages and sends them; subscribers that are slow or gone cost it nothing,
    because ZeroMQ drops what they do not take.

    If batches had to be dropped because that thread got no time, the next message says that the cache is
    empty and then what it contains, so that subscribers are right again.

    Attributes:
        log: gets the changes.
        num_published: changes that were handed to the thread.
        num_dropped: changes that were dropped because too many batches were pending.
    """

    def __init__(
        self, settings: KVEventSettings, block_size: int, limits: PublisherLimits | None = None
    ) -> None:
        """Publish nothing until `open`.

        Args:
            settings: where and what to publish.
            block_size: tokens of a block.
            limits: bounds of what is kept.
        """
        self.log = CacheLog()
        self.num_published = 0
        self.num_dropped = 0
        self._settings = settings
        self._block_size = block_size
        self._limits = limits or PublisherLimits()
        self._sender: _Sender | None = None
        self._is_behind = False

    def open(self) -> None:
        """Open the sockets and start the thread.

        Raises:
            StartupError: pyzmq is missing, or an endpoint cannot be used; the message names it.
        """
        self._sender = _Sender(self._settings, self._block_size, self._limits)

    def flush(self) -> None:
        """Hand the changes since the last call to the thread; the engine calls this after each step."""
        sender = self._sender
        if sender is None:
            return
        changes = self.log.take()
        if len(sender.pending) >= self._limits.max_pending:
            self._drop(len(changes))
        elif self._is_behind:
            whole = [(ChangeKind.STORED, block) for block in self.log.findable()]
            self._is_behind = False
            self._hand_over(sender, Pending(time.time(), whole, is_whole=True), len(changes))
        elif changes:
            self._hand_over(sender, Pending(time.time(), changes), len(changes))

    def wait_s(self) -> float | None:
        """How long `flush` may be put off; None: until there are changes."""
        return _CATCH_UP_S if self._is_behind else None

    def close(self) -> None:
        """Send what is pending, for a second at most, and close the sockets."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _hand_over(self, sender: _Sender, pending: Pending, num_changes: int) -> None:
        self.num_published += num_changes
        sender.pending.append(pending)
        sender.wake()

    def _drop(self, num_changes: int) -> None:
        if num_changes and not self._is_behind:
            self._is_behind = True
            logger.warning("KV events are dropped: %d batches are pending", self._limits.max_pending)
        self.num_dropped += num_changes


class _Sender:
    """The thread that sends, and its sockets.

    A message has three frames: the topic, a sequence number of eight bytes (big-endian, from 0 on), and a
    `KVEventBatch`. The first message says that the cache is empty.

    A replay is asked for with the first number wanted in eight bytes. The answer is a message for each batch
    that is still kept, with its number and its batch, and a last one with the number −1 and nothing.

    Attributes:
        pending: batches that are not sent yet; the engine's thread appends to it and then calls `wake`.
    """

    def __init__(self, settings: KVEventSettings, block_size: int, limits: PublisherLimits) -> None:
        """Open the sockets and start.

        Raises:
            StartupError: pyzmq is missing, or an endpoint cannot be used.
        """
        self.pending: deque[Pending] = deque([Pending(time.time(), [], is_whole=True)])
        self._settings = settings
        self._block_size = block_size
        self._limits = limits
        self._topic = settings.topic.encode()
        self._next_number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._num_kept_bytes = 0
        self._is_closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._zmq = _import_zmq()
        self._context = self._zmq.Context()
        self._subscribers = self._bind(
            self._zmq.PUB, "kv_events_endpoint", settings.endpoint, limits.max_behind
        )
        self._replays = self._open_replays() if settings.replay_endpoint else None
        self._waker = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at `pending`."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Send what is pending, for a second at most, and close the sockets."""
        self._is_closing = True
        self.wake()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(_LINGER_MS)
            os.close(self._waker)

    def _open_replays(self) -> Any:
        # A replay is sent at once, so all of it must fit.
        most, endpoint = self._limits.max_replayed + 1, self._settings.replay_endpoint
        replays = self._bind(self._zmq.ROUTER, "kv_events_replay_endpoint", endpoint, most)
        # A client that does not read is an error, not a silent loss.
        replays.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        return replays

    def _bind(self, kind: int, key: str, endpoint: str, max_unsent: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, max_unsent)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        socket.setsockopt(self._zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(0)
            reason = self._zmq.strerror(error.errno)
            expected = f"an address of this machine with a free port ({reason})"
            raise ConfigError(key, endpoint, expected) from error
        if not is_loopback_endpoint(endpoint):
            content = "tokens of prompts and outputs" if self._settings.has_token_ids else "hashes of prompts"
            logger.warning("%s = %s: anyone who can reach it can read %s", key, endpoint, content)
        return socket

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._waker, self._zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, self._zmq.POLLIN)
        while not self._is_closing or self.pending:
            ready = {source for source, _ in poller.poll()}
            if self._waker in ready:
                os.eventfd_read(self._waker)
            # Before a replay, which then has all that was handed over before it was asked for.
            while self.pending:
                self._publish(self.pending[0])
                self.pending.popleft()
            if self._replays in ready:
                self._replay()

    def _publish(self, pending: Pending) -> None:
        has_token_ids = self._settings.has_token_ids
        # Again with the first changes: subscribers are not back yet when an engine has just started again.
        before: list[KVEvent] = [AllBlocksCleared()] if pending.is_whole or self._next_number == 1 else []
        for begin in range(0, max(len(pending.changes), 1), _MAX_CHANGES):
            changes = pending.changes[begin : begin + _MAX_CHANGES]
            events = events_of(changes, self._block_size, has_token_ids=has_token_ids)
            if events or (pending.is_whole and not begin):
                self._send(KVEventBatch(pending.ts, before + events))
                before = []

    def _send(self, events: KVEventBatch) -> None:
        number = self._next_number.to_bytes(_NUMBER_BYTES, "big")
        batch = self._encoder.encode(events)
        self._next_number += 1
        self._subscribers.send_multipart((self._topic, number, batch))
        if self._replays is not None:
            self._keep(number, batch)

    def _keep(self, number: bytes, batch: bytes) -> None:
        self._kept.append((number, batch))
        self._num_kept_bytes += len(batch)
        limits = self._limits
        while len(self._kept) > limits.max_replayed or self._num_kept_bytes > limits.max_replayed_bytes:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self) -> None:
        """Answer one client; what is not a request is answered with the end alone.

        A client that is gone, or does not read, gets no more of its answer and misses the end.
        """
        assert self._replays is not None
        with contextlib.suppress(self._zmq.ZMQError):
            client, *frames = self._replays.recv_multipart(self._zmq.NOBLOCK)
            is_request = len(frames) == 2 and len(frames[1]) == _NUMBER_BYTES
            wanted = [each for each in self._kept if each[0] >= frames[1]] if is_request else []
            for number, batch in [*wanted, (END_OF_REPLAY, b"")]:
                self._replays.send_multipart((client, b"", number, batch), self._zmq.NOBLOCK)


def _import_zmq() -> ModuleType:
    try:
        import zmq
    except ImportError as error:
        raise StartupError(
            "kv_events_endpoint needs the package pyzmq: install naiad[kv-events], or leave the option out"
        ) from error
    return zmq
