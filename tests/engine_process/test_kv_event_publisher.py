"""Subscribers know what is in the prefix cache; those that are slow, late or absent cost nothing."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from helpers.kv_subscriber import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    Router,
    Subscriber,
    hashes,
    read_replay,
    replay,
)
from helpers.kv_traffic import KVTraffic
from helpers.ports import free_port
from naiad.config.kv_events import KVEventSettings
from naiad.engine_process.serving import kv_event_publisher
from naiad.engine_process.serving.kv_event_publisher import KVEventPublisher, Pending, PublisherLimits
from naiad.errors import ConfigError, StartupError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import PrefixIdentity

BLOCK_SIZE = 4
Context = zmq.Context[zmq.Socket[bytes]]
MakePublisher = Callable[..., KVEventPublisher]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(0)


def local(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture
def endpoint() -> str:
    return local(free_port())


@pytest.fixture
def make_publisher(endpoint: str) -> Iterator[MakePublisher]:
    made: list[KVEventPublisher] = []

    def make(limits: PublisherLimits | None = None, **settings: str | bool) -> KVEventPublisher:
        publisher = KVEventPublisher(KVEventSettings(endpoint, **settings), BLOCK_SIZE, limits)  # type: ignore[arg-type]
        made.append(publisher)
        publisher.open()
        return publisher

    yield make
    for publisher in made:
        publisher.close()


def cache_of(publisher: KVEventPublisher, num_blocks: int = 12) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, PrefixCache(BLOCK_SIZE, observer=publisher.log))


def fill(publisher: KVEventPublisher, cache: PrefixCache, text: list[int], first_block: int = 0) -> None:
    """Store a text's blocks and flush."""
    parent = None
    for index in range(len(text) // BLOCK_SIZE):
        parent = cache.insert(parent, PrefixIdentity(), text, index * BLOCK_SIZE, [first_block + index])
    publisher.flush()


def subscribed(context: Context, publisher: KVEventPublisher, endpoint: str, topic: str = "") -> Subscriber:
    """A subscriber whose subscription has arrived, while the cache is empty."""
    subscriber = Subscriber(context, endpoint, topic)
    scratch = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    deadline_s = time.monotonic() + 10
    while not subscriber.numbers:
        assert time.monotonic() < deadline_s
        # Both in one message, since the subscription may arrive between any two.
        scratch.insert(None, PrefixIdentity(), [9] * BLOCK_SIZE, 0, [0])
        scratch.evict(0)
        publisher.flush()
        subscriber.receive(0.02)
    catch_up(subscriber, publisher)
    assert subscriber.router.blocks == {}
    return subscriber


def settle(publisher: KVEventPublisher) -> int:
    """Wait until everything is sent; returns the last number."""
    sender = publisher._sender
    assert sender is not None
    deadline_s = time.monotonic() + 10
    while sender.pending:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return sender._next_number - 1


def catch_up(subscriber: Subscriber, publisher: KVEventPublisher) -> None:
    last = settle(publisher)
    subscriber.receive_until(lambda: subscriber.numbers[-1] == last)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_token_ids", [False, True])
def test_events_rebuild_the_index(
    make_publisher: MakePublisher, context: Context, endpoint: str, seed: int, has_token_ids: bool
) -> None:
    publisher = make_publisher(has_token_ids=has_token_ids, topic="kv@pod@model")
    subscriber = subscribed(context, publisher, endpoint, "kv@pod@model")
    cache = cache_of(publisher)
    traffic = KVTraffic(seed, cache)
    rng = random.Random(seed)
    for count in range(400):
        traffic.operate()
        if rng.random() < 0.5:
            publisher.flush()
        if count % 100 == 99:
            publisher.flush()
            found = [b for b in publisher.log.findable() if not has_token_ids or not b.identity.salt]
            catch_up(subscriber, publisher)
            assert subscriber.router.blocks.keys() == hashes(found)
    first = subscriber.numbers[0]
    assert subscriber.numbers == list(range(first, first + len(subscriber.numbers)))
    assert publisher.num_dropped == 0
    assert any(salt for salt, _ in traffic.texts)
    for tokens in (tokens for _, tokens in subscriber.router.blocks.values()):
        assert len(tokens) == (BLOCK_SIZE if has_token_ids else 0)


def test_a_message_is_what_vllm_documents(
    make_publisher: MakePublisher, context: Context, endpoint: str
) -> None:
    publisher = make_publisher(has_token_ids=True, topic="kv@a@b")
    subscriber = subscribed(context, publisher, endpoint, "kv@a@b")
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    before_s = time.time()
    fill(publisher, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    fill(publisher, cache, [1, 2, 3, 4, 5, 6, 7, 8, 70_000, 10, 11, 12])
    cache.evict(0)
    publisher.flush()
    assert subscriber.socket.poll(5000)
    topic, number, payload = subscriber.socket.recv_multipart()
    assert topic == b"kv@a@b"
    assert int.from_bytes(number, "big") == subscriber.numbers[-1] + 1
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert before_s <= ts <= time.time()
    assert rank == 0
    stored = {"type": "BlockStored", "block_size": 4, "lora_id": None, "lora_name": None, "medium": "GPU"}
    first, second = events[0]["block_hashes"]
    told = {"block_hashes": [first, second], "parent_block_hash": None, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}
    assert events == [stored | told]
    _, events, _ = msgspec.msgpack.decode(subscriber.socket.recv_multipart()[2])
    (third,) = events[0]["block_hashes"]
    told = {"block_hashes": [third], "parent_block_hash": second, "token_ids": [70_000, 10, 11, 12]}
    assert events == [stored | told]
    _, events, _ = msgspec.msgpack.decode(subscriber.socket.recv_multipart()[2])
    assert events == [{"type": "BlockRemoved", "block_hashes": [third, second, first], "medium": "GPU"}]
    assert all(0 <= each < 1 << 64 for each in (first, second, third))


def test_hashes_are_equal_in_replicas_and_differ_by_salt() -> None:
    caches = [PrefixCache(BLOCK_SIZE) for _ in range(2)]
    salts = ("", "", "a", "b")
    blocks = [
        caches[index % 2].insert(None, PrefixIdentity(salt), [1, 2, 3, 4], 0, [index])
        for index, salt in enumerate(salts)
    ]
    assert hashes(blocks[:1]) == hashes(blocks[1:2]) == {7199850794334859721}
    assert len(hashes(blocks)) == 3


def test_a_replay_has_what_was_missed_and_an_end(
    make_publisher: MakePublisher, context: Context, endpoint: str
) -> None:
    replay_endpoint = local(free_port())
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    cache = cache_of(publisher)
    traffic = KVTraffic(3, cache)
    for _ in range(100):
        traffic.operate()
        publisher.flush()
    router = Router()
    batches = replay(context, replay_endpoint, 0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    for _, payload in batches:
        router.take(payload)
    # The start, and the first changes.
    assert router.num_clears == 2
    assert router.blocks.keys() == hashes(publisher.log.findable())
    assert replay(context, replay_endpoint, len(batches) - 3) == batches[-3:]
    assert replay(context, replay_endpoint, len(batches) + 7) == []
    with context.socket(zmq.REQ) as requester:
        requester.connect(replay_endpoint)
        requester.send((2).to_bytes(8, "big"))
        assert requester.recv_multipart() == [(2).to_bytes(8, "big"), batches[2][1]]


def test_a_replay_keeps_only_so_much(make_publisher: MakePublisher, context: Context) -> None:
    replay_endpoint = local(free_port())
    limits = PublisherLimits(max_replayed=5)
    publisher = make_publisher(limits, replay_endpoint=replay_endpoint)
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    for index in range(20):
        fill(publisher, cache, [index] * BLOCK_SIZE, index)
    assert [number for number, _ in replay(context, replay_endpoint, 0)] == [16, 17, 18, 19, 20]


@pytest.mark.parametrize("frames", [[b"", b"short"], [b"no delimiter"], [b"", b"", b"12345678"]])
def test_what_is_no_request_for_a_replay_gets_the_end(
    make_publisher: MakePublisher, context: Context, frames: list[bytes]
) -> None:
    replay_endpoint = local(free_port())
    make_publisher(replay_endpoint=replay_endpoint)
    with context.socket(zmq.DEALER) as socket:
        socket.connect(replay_endpoint)
        socket.send_multipart(frames)
        assert read_replay(socket) == []
    assert len(replay(context, replay_endpoint, 0)) == 1


def test_a_huge_request_ends_its_connection_alone(make_publisher: MakePublisher, context: Context) -> None:
    replay_endpoint = local(free_port())
    make_publisher(replay_endpoint=replay_endpoint)
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(replay_endpoint)
        socket.send_multipart([b"", b"x" * 1_000_000])
        assert not socket.poll(200)
    assert len(replay(context, replay_endpoint, 0)) == 1


def test_without_subscribers_nothing_piles_up(make_publisher: MakePublisher) -> None:
    publisher = make_publisher()
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    for index in range(2000):
        fill(publisher, cache, [index] * BLOCK_SIZE, index)
    assert settle(publisher) == 2000
    assert (publisher.num_published, publisher.num_dropped) == (2000, 0)
    assert publisher._sender is not None
    assert not publisher._sender._kept


def test_a_subscriber_that_does_not_read_delays_nobody(
    make_publisher: MakePublisher, context: Context, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One message when a text comes and one when it goes; the reader is never further behind than that.
    monkeypatch.setattr(kv_event_publisher, "_MAX_CHANGES", 8000)
    publisher = make_publisher(PublisherLimits(max_behind=8), has_token_ids=True)
    sleeper = Subscriber(context, endpoint, max_unread=1)
    reader = subscribed(context, publisher, endpoint)
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    # More than the kernel keeps for a connection: each text has 32,000 tokens.
    for index in range(24):
        fill(publisher, cache, [70_000 + index] * 32_000)
        catch_up(reader, publisher)
        for block_id in range(32_000 // BLOCK_SIZE):
            cache.evict(block_id)
        publisher.flush()
    settle(publisher)
    assert publisher.num_dropped == 0
    num_sent = reader.numbers[-1] - reader.numbers[0]
    num_read = 0
    while sleeper.socket.poll(200):
        sleeper.socket.recv_multipart()
        num_read += 1
    assert 0 < num_read < num_sent


def test_after_a_loss_subscribers_are_right_again(
    make_publisher: MakePublisher, context: Context, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(PublisherLimits(max_pending=3))
    subscriber = subscribed(context, publisher, endpoint)
    num_clears = subscriber.router.num_clears
    sender = publisher._sender
    assert sender is not None
    publish, may_go_on = sender._publish, threading.Event()

    def held(pending: Pending) -> None:
        assert may_go_on.wait(60)
        publish(pending)

    # The thread stands still with the first batch, which counts as pending until it is sent.
    monkeypatch.setattr(sender, "_publish", held)
    cache = cache_of(publisher)
    traffic = KVTraffic(5, cache)
    for _ in range(60):
        traffic.operate()
        publisher.flush()
    assert publisher.num_dropped > 0
    may_go_on.set()
    settle(publisher)
    publisher.flush()
    wanted = hashes(publisher.log.findable())
    assert wanted
    catch_up(subscriber, publisher)
    assert subscriber.router.num_clears == num_clears + 1
    assert subscriber.router.blocks.keys() == wanted
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


def test_the_first_changes_say_again_that_the_cache_was_empty(
    make_publisher: MakePublisher, context: Context
) -> None:
    # A subscriber of an engine that has started again may not be back when the first message is sent.
    replay_endpoint = local(free_port())
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    for text in (1, 2):
        fill(publisher, cache, [text] * BLOCK_SIZE, text)
        settle(publisher)
    batches = [
        msgspec.msgpack.decode(payload, type=EventBatch).events
        for _, payload in replay(context, replay_endpoint, 0)
    ]
    assert [[type(each) for each in events] for events in batches] == [
        [AllBlocksCleared],
        [AllBlocksCleared, BlockStored],
        [BlockStored],
    ]


def test_many_changes_are_several_messages_of_which_the_first_clears(
    make_publisher: MakePublisher, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "_MAX_CHANGES", 3)
    replay_endpoint = local(free_port())
    publisher = make_publisher(replay_endpoint=replay_endpoint)
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    fill(publisher, cache, list(range(8 * BLOCK_SIZE)))
    settle(publisher)
    batches = [
        msgspec.msgpack.decode(payload, type=EventBatch).events
        for _, payload in replay(context, replay_endpoint, 1)
    ]
    clear, *stored = [event for events in batches for event in events]
    assert clear == AllBlocksCleared()
    assert [len(each.block_hashes) for each in stored] == [3, 3, 2]
    assert [len(events) for events in batches] == [2, 1, 1]
    assert [each.parent_block_hash for each in stored] == [
        None,
        stored[0].block_hashes[-1],
        stored[1].block_hashes[-1],
    ]


def test_while_changes_are_dropped_the_engine_does_not_wait_for_long(make_publisher: MakePublisher) -> None:
    publisher = make_publisher(PublisherLimits(max_pending=0))
    assert publisher.wait_s() is None
    fill(publisher, PrefixCache(BLOCK_SIZE, observer=publisher.log), [1] * BLOCK_SIZE)
    assert publisher.num_dropped == 1
    assert publisher.wait_s() is not None


def test_the_first_message_says_that_the_cache_is_empty(
    make_publisher: MakePublisher, context: Context
) -> None:
    replay_endpoint = local(free_port())
    make_publisher(replay_endpoint=replay_endpoint)
    ((number, payload),) = replay(context, replay_endpoint, 0)
    assert number == 0
    assert msgspec.msgpack.decode(payload, type=EventBatch).events == [AllBlocksCleared()]


def test_what_is_pending_is_sent_at_the_end(
    make_publisher: MakePublisher, context: Context, endpoint: str
) -> None:
    publisher = make_publisher()
    subscriber = subscribed(context, publisher, endpoint)
    cache = PrefixCache(BLOCK_SIZE, observer=publisher.log)
    fill(publisher, cache, [5] * BLOCK_SIZE)
    publisher.close()
    publisher.flush()
    subscriber.receive_until(lambda: len(subscriber.router.blocks) == 1)


@pytest.mark.parametrize("key", ["kv_events_endpoint", "kv_events_replay_endpoint"])
def test_an_endpoint_in_use_is_refused_by_name(key: str, context: Context) -> None:
    taken, free = free_port(), free_port()
    with context.socket(zmq.REP) as other:
        other.bind(local(taken))
        ports = (taken, free) if key == "kv_events_endpoint" else (free, taken)
        publisher = KVEventPublisher(KVEventSettings(local(ports[0]), local(ports[1])), BLOCK_SIZE)
        with pytest.raises(ConfigError, match=rf"^{key} = 'tcp://127.0.0.1:{taken}': expected .*in use"):
            publisher.open()
    # The other port is free again.
    publisher = KVEventPublisher(KVEventSettings(local(free)), BLOCK_SIZE)
    publisher.open()
    publisher.close()


def test_an_address_that_is_not_here_is_refused() -> None:
    publisher = KVEventPublisher(KVEventSettings(f"tcp://192.0.2.1:{free_port()}"), BLOCK_SIZE)
    with pytest.raises(ConfigError, match=r"^kv_events_endpoint = .*: expected an address of this machine"):
        publisher.open()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    publisher = KVEventPublisher(KVEventSettings(local(free_port())), BLOCK_SIZE)
    with pytest.raises(StartupError, match=r"pyzmq.*naiad\[kv-events\]"):
        publisher.open()


def test_an_address_that_others_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    publisher = KVEventPublisher(KVEventSettings(f"tcp://*:{free_port()}", has_token_ids=True), BLOCK_SIZE)
    publisher.open()
    publisher.close()
    assert "anyone who can reach it can read tokens of prompts and outputs" in caplog.text
