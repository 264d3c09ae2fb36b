"""A real engine process publishes its prefix cache, also after it was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from helpers.engine_harness import Recorder, wait_until
from helpers.kv_subscriber import Router, hashes, replay
from helpers.ports import free_port
from helpers.tiny_repository import tiny_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.errors import StartupError
from naiad.kv_cache.prefix_cache import CachedBlock, PrefixCache
from naiad.sequence import EngineRequest, PrefixIdentity, SamplingParams

BLOCK_SIZE = 16
PROMPT = list(range(5, 45))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def make_client(
    checkpoint: Path, socket_path: Path, endpoint: str, replay_port: int
) -> tuple[EngineClient, Recorder]:
    recorder = Recorder()
    config = EngineConfig(
        model_dir=str(checkpoint),
        dtype="float32",
        cpu_kernels="torch",
        drafter="none",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 24,
        kv_events_endpoint=endpoint,
        kv_events_replay_endpoint=str(replay_port),
        kv_events_token_ids=True,
    )
    return EngineClient(config, socket_path, recorder.on_outputs, recorder.on_lost), recorder


def serve(client: EngineClient, recorder: Recorder, sequence_id: int, salt: str = "") -> list[int]:
    params = SamplingParams(max_tokens=20)
    request = EngineRequest(sequence_id=sequence_id, prompt_token_ids=PROMPT, params=params, cache_salt=salt)
    client.submit([request])
    recorder.wait_finished(sequence_id)
    return [*PROMPT, *recorder.token_ids(sequence_id)]


def kill_and_wait(client: EngineClient) -> None:
    """Kill the engine process and wait for the next one."""
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: client.is_ready and client.pid != pid)


def blocks_of(text: list[int]) -> list[CachedBlock]:
    """The text's full blocks, as this process names them."""
    cache, chain = PrefixCache(BLOCK_SIZE), list[CachedBlock]()
    for index in range(len(text) // BLOCK_SIZE):
        parent = chain[-1] if chain else None
        chain.append(cache.insert(parent, PrefixIdentity(), text, index * BLOCK_SIZE, [index]))
    return chain


def test_the_cache_is_published_and_again_after_a_kill(
    tmp_path: Path, socket_dir: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    port, replay_port = free_port(), free_port()
    client, recorder = make_client(checkpoint, socket_dir / "llm.engine", str(port), replay_port)
    try:
        client.start()
        for sequence_id in (1, 2):
            text = serve(client, recorder, sequence_id)
            # The last token of all is sampled and not computed.
            wanted = blocks_of(text[:-1])
            assert len(wanted) == 3
            serve(client, recorder, 10 + sequence_id, salt="secret")
            router = Router()
            for _, payload in replay(context, f"tcp://127.0.0.1:{replay_port}", 0):
                router.take(payload)
            assert router.blocks.keys() == hashes(wanted)
            assert [list(tokens) for _, tokens in router.blocks.values()] == [
                text[start : start + BLOCK_SIZE] for start in range(0, 3 * BLOCK_SIZE, BLOCK_SIZE)
            ]
            # What has a salt is not published, but counted.
            assert recorder.stats[-1].total_kv_events == 6
            assert recorder.stats[-1].total_dropped_kv_events == 0
            if sequence_id == 1:
                kill_and_wait(client)
    finally:
        client.close(timeout_s=1)


def test_an_engine_whose_endpoint_is_taken_says_so(
    tmp_path: Path, socket_dir: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        client, _ = make_client(tmp_path, socket_dir / "llm.engine", endpoint, free_port())
        with pytest.raises(
            StartupError, match=rf"kv_events_endpoint = '{endpoint}': expected .*Address already in use"
        ):
            client.start()
        client.close(timeout_s=0)
