"""`naiad serve` with KV events: a subscriber learns what requests leave in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from helpers.kv_subscriber import Router, Subscriber, replay
from helpers.ports import free_port
from helpers.server import Server, eventually, start_server

pytestmark = pytest.mark.slow
TOPIC = "kv@here@tiny"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def ask(server: Server, text: str, **fields: object) -> None:
    body = {"text_input": text, "max_tokens": 4, **fields}
    assert server.post("/v2/models/text/generate", body)[0] == 200


def test_a_subscriber_learns_what_is_cached(tiny_dir: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port, replay_port = free_port(), free_port()
    options = (
        *("--kv-events-endpoint", str(port), "--kv-events-replay-endpoint", str(replay_port)),
        *("--kv-events-token-ids", "true", "--kv-events-topic", TOPIC),
        *("--block-size", "16", "--kv-cache-bytes", "16000000", "--drafter", "none"),
    )
    server = start_server(tiny_dir, *options)
    try:
        subscriber = Subscriber(context, f"tcp://127.0.0.1:{port}", TOPIC)
        texts = iter("abcdefghijklmnopqrstuvwxyz")

        def has_heard() -> bool:
            # Until the subscription has arrived, there is nobody to hear anything.
            ask(server, next(texts) * 100)
            return subscriber.receive(0.2) is not None

        eventually(has_heard)
        heard = len(subscriber.router.blocks)
        assert heard >= 2
        ask(server, "A" * 100, cache_salt="secret")
        assert subscriber.receive(1.0) is None
        ask(server, "B" * 100)
        assert subscriber.receive() is not None
        assert len(subscriber.router.blocks) == 2 * heard
        router = Router()
        for _, payload in replay(context, f"tcp://127.0.0.1:{replay_port}", 0):
            router.take(payload)
        assert router.blocks.items() >= subscriber.router.blocks.items()
        # Blocks with a salt are counted, though they are not published with their tokens.
        eventually(lambda: server.metric("naiad_kv_events_total") == len(router.blocks) + heard)
        assert server.metric("naiad_kv_events_dropped_total") == 0
    finally:
        server.stop()


def test_an_endpoint_that_cannot_be_used_is_named(tiny_dir: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        said = rf"kv_events_endpoint = 'tcp://127.0.0.1:{port}': expected .*\(Address already in use\)"
        with pytest.raises(AssertionError, match=said):
            start_server(tiny_dir, "--kv-events-endpoint", str(port))
