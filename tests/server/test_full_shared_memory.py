"""/dev/shm is full while the server serves."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.raw_grpc import Outcome, ask, text_inputs
from helpers.server import Leaving, Server, eventually, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint

# A shared memory of its own, as small as docker's.
OWN = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
LONG = "a" * 3_000_000
# Its context logits are longer than what a region has left.
LONG_ANSWER = "a" * 2_000


def can_mount() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode == 0
    return False


pytestmark = pytest.mark.skipif(
    not can_mount(), reason="a /dev/shm of its own needs mount namespaces and the right to mount"
)


@pytest.fixture
def server(tmp_path: Path, leaving: Leaving) -> Iterator[Server]:
    (tmp_path / "checkpoint").mkdir()
    create_repository(tmp_path / "repository", tiny_checkpoint(tmp_path / "checkpoint"))
    started = start_repository("--model-repository", str(tmp_path / "repository"), around=OWN)
    yield started
    leaving.take(started)


@contextlib.contextmanager
def full(server: Server) -> Iterator[None]:
    """Nobody gets more of the server's shared memory."""
    filler = Path(f"/proc/{server.process.pid}/root/dev/shm/filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        filler.unlink()


def served(server: Server, model: str) -> bool:
    outcome = ask(server.grpc, model, text_inputs("Hello", 4, ignore_eos=True))
    return not outcome.errors and not outcome.call_error and outcome.num_finals == 1


def test_what_needs_more_of_it_is_refused_and_the_rest_is_served(server: Server) -> None:
    with full(server):
        for model in ("text", "ensemble"):
            assert served(server, model)
            refused = ask(server.grpc, model, text_inputs(LONG, 4))
            assert "shared memory" in refused.errors[0], refused
            assert refused.num_finals == 1
            assert served(server, model)
    for model in ("text", "ensemble"):
        refused = ask(server.grpc, model, text_inputs(LONG, 4))
        assert "shared memory" not in str(refused.errors)
        assert served(server, model)


def test_an_answer_that_needs_more_of_it_ends_with_an_error(server: Server) -> None:
    def answer(model: str) -> Outcome:
        # The first part of a streamed answer has the logits; of an unstreamed one the last.
        inputs = text_inputs(LONG_ANSWER, 4, return_context_logits=True, ignore_eos=True)
        return ask(server.grpc, model, inputs | {"stream": model == "ensemble"})

    for model in ("text", "ensemble"):
        assert served(server, model)
        with full(server):
            refused = answer(model)
            assert "shared memory" in refused.errors[0], refused
            assert refused.num_finals == 1
            assert served(server, model)
        outcome = answer(model)
        assert not outcome.errors
        assert outcome.num_finals == 1
    assert server.used_blocks() == 0


@pytest.mark.slow
def test_many_small_answers_at_once_end_each(server: Server) -> None:
    """Prompts and answers are together more than a region has, but it never holds all of them."""
    inputs = text_inputs("a" * 28_000, 2, ignore_eos=True)
    assert not ask(server.grpc, "text", inputs).errors
    for model in ("text", "ensemble"):
        with full(server), ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(ask, server.grpc, model, inputs) for _ in range(60)]
            outcomes = [each.result(120) for each in asked]
        assert [each.num_finals for each in outcomes] == [1] * 60
        assert all("shared memory" in error for each in outcomes for error in each.errors)
        assert any(not each.errors for each in outcomes)
    eventually(lambda: server.used_blocks() == 0)
