"""The device fails in a step: a real engine whose process has lost it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import failing_device_child
from helpers.engine_harness import Recorder, wait_until
from helpers.failing_device_child import FAULT
from helpers.tiny_repository import endless_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.errors import UnavailableError
from naiad.sequence import EngineRequest, FinishReason, SamplingParams

PROMPT = list(range(5, 45))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return endless_checkpoint(tmp_path / "model")


@pytest.fixture
def engine(model_dir: Path) -> Iterator[tuple[EngineClient, Recorder]]:
    recorder = Recorder()
    config = EngineConfig(
        model_dir=str(model_dir), dtype="float32", max_model_len=2048, kv_cache_bytes=20_000_000
    )
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as folder:
        command = [sys.executable, failing_device_child.__file__]
        socket_path = Path(folder) / "llm.engine"
        client = EngineClient(config, socket_path, recorder.on_outputs, recorder.on_lost, command=command)
        client.start()
        yield client, recorder
        client.close(timeout_s=0)


def asked(sequence_id: int, num_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=num_tokens)
    return EngineRequest(sequence_id=sequence_id, prompt_token_ids=[*PROMPT, sequence_id % 7], params=params)


def test_a_device_that_fails_costs_what_runs_and_the_engine_comes_back(
    engine: tuple[EngineClient, Recorder], model_dir: Path
) -> None:
    client, recorder = engine
    client.submit([asked(7, 12)])
    recorder.wait_finished(7)
    running = (1, 2, 3)
    client.submit([asked(each, 1800) for each in running])
    for each in running:
        recorder.wait_started(each)
    (model_dir / FAULT).touch()
    recorder.wait_finished(*running)
    for each in running:
        last = recorder.outputs[each][-1]
        assert (last.finish_reason, last.error_status) == (FinishReason.ERROR, "INTERNAL")
        assert recorder.num_finishes(each) == 1
    recorder.wait_for(lambda: recorder.num_losses == 1)
    with pytest.raises(UnavailableError):
        client.submit([asked(4, 12)])
    wait_until(lambda: client.is_ready)
    client.submit([asked(14, 12)])
    recorder.wait_finished(14)
    assert recorder.token_ids(14) == recorder.token_ids(7)
