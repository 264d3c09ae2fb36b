"""Models come and go: which are expected back, and who reads and holds their checkpoints."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.engine_harness import Recorder, fake_command
from naiad.config import EngineConfig
from naiad.engine_process import AckReceiver, EngineClient
from naiad.engine_process.instance import claim_instance
from naiad.engine_process.runtime_dir import remove_runtime_directory, runtime_directory
from naiad.errors import EngineAwayError, InternalError
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.engines import checkpoint_loader, local_model, model_names
from naiad.openai_server.engines.interface import LoadedCheckpoint
from naiad.openai_server.engines.local_models import LocalModels
from naiad.outputs import RequestOutput


@pytest.fixture
def directory() -> Iterator[Path]:
    path = runtime_directory(os.getpid())
    yield path
    remove_runtime_directory(path)


def test_a_loaded_model_is_expected_back_however_long_its_engine_takes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "EXPECTED_BACK_S", 0.5)
    instance, number_lock = claim_instance(os.getpid(), "llm")
    engine = serving(directory, instance.engine_socket)

    async def test() -> None:
        with ThreadPoolExecutor(1) as pool:
            models = LocalModels(os.getpid(), pool, FamilyChoices())
            while not models.by_name():
                await models.look()
            engine.close(timeout_s=0)
            while models.by_name():
                await asyncio.sleep(0.01)
            for _ in range(3):
                await asyncio.sleep(0.4)
                await models.look()
                with pytest.raises(EngineAwayError):
                    models.get("fake")
            # It is unloaded.
            number_lock.release()
            await asyncio.sleep(0.6)
            await models.look()
            with pytest.raises(APIError, match="does not exist"):
                models.get("fake")
            await models.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        engine.close(timeout_s=0)
        number_lock.release()


def test_a_name_stays_with_its_model_while_its_engine_is_away(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models have one checkpoint. The other one answers for nobody because an engine starts again."""
    claims = [claim_instance(os.getpid(), name) for name in ("llm_b", "llm_a")]
    engines = [serving(directory, instance.engine_socket) for instance, _ in claims]

    async def test() -> None:
        with ThreadPoolExecutor(1) as pool:
            models = LocalModels(os.getpid(), pool, FamilyChoices())
            while len(models.by_name()) < 2:
                await models.look()
            assert {name: model.engine for name, model in models.by_name().items()} == {
                "fake": "llm_a",
                "llm_b": "llm_b",
            }
            engines[1].close(timeout_s=0)
            while len(models.by_name()) == 2:
                await asyncio.sleep(0.01)
            await models.look()
            with pytest.raises(EngineAwayError):
                models.get("fake")
            assert models.get("llm_b").engine == "llm_b"
            # It is unloaded, and not expected back any more: its name is free.
            monkeypatch.setattr(model_names, "EXPECTED_BACK_S", 0.0)
            claims[1][1].release()
            await asyncio.sleep(0.01)
            await models.look()
            assert models.get("fake").engine == "llm_b"
            await models.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        for engine, (_, number_lock) in zip(engines, claims, strict=True):
            engine.close(timeout_s=0)
            number_lock.release()


def serving(directory: Path, engine_socket: Path) -> EngineClient:
    recorder = Recorder()
    engine = EngineClient(
        EngineConfig(model_dir=str(directory)),
        engine_socket,
        recorder.on_outputs,
        recorder.on_lost,
        command=fake_command("good"),
    )
    engine.start()
    return engine


def test_a_name_that_nobody_has_heard_yet_is_not_refused(directory: Path) -> None:
    instance, number_lock = claim_instance(os.getpid(), "llm")

    async def test() -> None:
        with ThreadPoolExecutor(1) as pool:
            models = LocalModels(os.getpid(), pool, FamilyChoices())
            # It has not looked yet.
            with pytest.raises(EngineAwayError):
                models.get("fake")
            await models.look()
            with pytest.raises(APIError, match="does not exist"):
                models.get("fake")
            # A model is there whose engine is being started again: it may have this name.
            acks = AckReceiver(instance.ack_socket)
            await models.look()
            with pytest.raises(EngineAwayError):
                models.get("fake")
            acks.close()
            await models.look()
            with pytest.raises(APIError, match="does not exist"):
                models.get("fake")
            await models.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        number_lock.release()


def test_an_output_that_can_not_be_taken_ends_its_generation_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, texts, aborted = Mock(trace=None), Mock(), list[int]()
    asked.parsers.return_value = ()
    asked.request.num_sequences = asked.request.outputs.num_sequences = 1
    texts.of.side_effect = [KeyError("a secret detail"), ("a",)]

    async def test() -> None:
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            model = local_model.LocalModel(directory, "llm", loop, pool, Mock())
            monkeypatch.setattr(model._client, "abort", aborted.extend)
            failing, served = model._register(asked, texts), model._register(asked, texts)
            model._take_outputs([RequestOutput(1, [5]), RequestOutput(2, [5])], None)
            with pytest.raises(InternalError, match="internal error while answering the request"):
                await failing.next()
            assert [delta.text for delta in await served.next()] == ["a"]
            model.close()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert aborted == [1]
    (said,) = caplog.messages
    assert said.startswith("an output could not be taken: KeyError at ")


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    """Stands in for what reads tokenizers, and makes nothing of them."""
    readings = Readings()

    def checkpoint_of(info: Any, tokenizer: Any, _families: FamilyChoices) -> LoadedCheckpoint:
        return LoadedCheckpoint(info, tokenizer, Mock(), Mock())

    monkeypatch.setattr(checkpoint_loader, "Tokenizer", readings)
    monkeypatch.setattr(checkpoint_loader, "_checkpoint_of", checkpoint_of)
    return readings


class Readings:
    """Takes the place of `Tokenizer`.

    Attributes:
        threads: names of the threads that have read.
        num_held: for each reading, how many tokenizers were still held.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.num_held: list[int] = []
        self._tokenizers: list[weakref.ref[Any]] = []

    def from_directory(self, _directory: str) -> Any:
        self.threads.append(threading.current_thread().name)
        self.num_held.append(sum(each() is not None for each in self._tokenizers))
        tokenizer: Any = type("Tokenizer", (), {})()  # a mock holds itself in cycles
        self._tokenizers.append(weakref.ref(tokenizer))
        return tokenizer


def test_one_thread_reads_every_checkpoint(directory: Path, tmp_path: Path, readings: Readings) -> None:
    """The C library keeps what a thread frees for it, so four that read take four times the memory."""
    serve_three_times(directory, tmp_path, change=True)
    # Threads of the pool are called ThreadPoolExecutor-….
    assert readings.threads == ["openai-load_0"] * 3


def test_a_checkpoint_is_let_go_before_the_next_is_read(
    directory: Path, tmp_path: Path, readings: Readings
) -> None:
    """A tokenizer takes tens of megabytes, so the model must not hold one while the next is read."""
    serve_three_times(directory, tmp_path, change=True)
    assert readings.num_held == [0, 0, 0]


def test_a_checkpoint_that_is_the_same_is_not_read_again(
    directory: Path, tmp_path: Path, readings: Readings
) -> None:
    """Each reading leaves some megabytes with the process, and most engines that come are the same ones."""
    serve_three_times(directory, tmp_path, change=False)
    assert len(readings.threads) == 1


def test_another_model_of_the_checkpoint_reads_nothing(
    tmp_path: Path, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is started again has a directory of its own, and so a model of its own here."""

    def ready(directory: Path) -> Any:
        return Mock(checkpoint=Mock(model_dir=str(directory)))

    async def test() -> None:
        loader = checkpoint_loader.CheckpointLoader(FamilyChoices())
        others = [tmp_path / str(number) for number in range(4)]
        for directory in others:
            directory.mkdir()
            (directory / "tokenizer.json").write_text("{}")
        first = await loader.load(ready(others[0]))
        assert (await loader.load(ready(others[0]))).tokenizer is first.tokenizer
        assert len(readings.threads) == 1
        for directory in others:
            await loader.load(ready(directory))
        assert len(readings.threads) == 4
        # Not all are kept for ever.
        monkeypatch.setattr(checkpoint_loader, "_MOST_TOKENIZERS", 1)
        await loader.load(ready(others[3]))
        assert len(readings.threads) == 4
        await loader.load(ready(others[0]))
        assert len(readings.threads) == 5
        loader.close()

    asyncio.run(test())


def serve_three_times(directory: Path, model_dir: Path, *, change: bool) -> None:
    """Have an engine start, and its checkpoint asked for, three times; each time it may have changed."""
    instance, number_lock = claim_instance(os.getpid(), "llm")

    async def served_once(models: LocalModels) -> None:
        engine = serving(model_dir, instance.engine_socket)
        try:
            while not models.by_name():
                await models.look()
            await models.get("fake").loaded()
        finally:
            engine.close(timeout_s=0)
        while models.by_name():
            await asyncio.sleep(0.01)

    async def test() -> None:
        with ThreadPoolExecutor(4) as pool:
            models = LocalModels(os.getpid(), pool, FamilyChoices())
            for number in range(3):
                if change or number == 0:
                    (model_dir / "tokenizer.json").write_text("{}" + " " * number)
                await served_once(models)
            await models.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        number_lock.release()
