"""Steps that two ranks replay: each has captured its own, with the exchanges inside."""

from __future__ import annotations

import queue
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_interpreter import Interpret
from kernels_on_cpu import kernels_on_cpu
from test_graphed_steps import MODELS, NUM_REPLAYED, Recorder, generate, run_steps

from helpers.thread_ranks import RankOfThread, ThreadGroup
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.paged_model import PagedModel
from naiad.model_runner.ranks.follower import Follower
from naiad.model_runner.ranks.followers import LeadModel
from naiad.model_runner.ranks.messages import AllocatePool, RankMessage, encoder, message_decoder
from naiad.models.registry import load_part
from naiad.models.split.part import Part
from naiad.models.split.place import Place
from naiad.models.split.stage import Stage
from naiad_kernels.linear import LoadOptions

BLOCK = 16
NUM_BLOCKS = 16


class OneFollower:
    """The second of two ranks, in a thread that takes turns with the first."""

    staged = None
    num_parts = 2

    def __init__(self, directory: Path, config: EngineConfig, group: ThreadGroup, recorder: Recorder) -> None:
        self.group = group.of(0)
        self._turns = group
        self._messages = queue.SimpleQueue[bytes | None]()
        place, own = Place(Stage(0, 1), Part(1, 2)), group.of(1)
        model = part_of(directory, place, own)
        self._follower = Follower(
            model,
            config,
            torch.float32,
            place,
            own,
            None,
            recorder.capture,  # type: ignore[arg-type]
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, message: RankMessage) -> None:
        self._messages.put(encoder.encode(message))

    def close(self) -> None:
        """Called by whoever has the turn."""
        self._messages.put(None)
        self._turns.turn.release()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        while (body := self._messages.get()) is not None:
            with self._turns.turn:
                try:
                    self._follower.handle(message_decoder.decode(body))
                except BaseException:
                    self._turns.abort()
                    raise


def part_of(directory: Path, place: Place, own: RankOfThread) -> Any:
    config = ModelConfig.from_directory(directory)
    return load_part(str(directory), config, LoadOptions(), place, own)  # type: ignore[arg-type]


def generate_by_two(directory: Path) -> tuple[list[list[int]], list[Recorder]]:
    """The ids of three sequences, and what each rank has captured."""
    config = EngineConfig(
        cpu_kernels="torch",
        model_dir=str(directory),
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        tensor_parallel_size=2,
    )
    group, recorders = ThreadGroup(2, takes_turns=True), [Recorder(), Recorder()]
    cpu = torch.device("cpu")
    with kernels_on_cpu(), torch.inference_mode():
        followers = OneFollower(directory, config, group, recorders[1])
        part = part_of(directory, Place(Stage(0, 1), Part(0, 2)), followers.group)
        num_blocks = [NUM_BLOCKS] * len(part.config.layer_groups)
        followers.tell(AllocatePool(num_blocks))
        runner = PagedModel(
            LeadModel(part, followers),  # type: ignore[arg-type]
            KVPool(part.config, num_blocks, BLOCK, torch.float32, cpu),
            cache_layout(config, part.config, torch.float32, cpu),
            64,
            followers=followers,  # type: ignore[arg-type]
        )
        group.turn.acquire()
        try:
            return run_steps(runner, recorders[0]), recorders
        finally:
            followers.close()


@pytest.mark.parametrize(("architecture", "settings"), MODELS)
def test_ranks_replay_the_steps_that_one_process_computes(
    interpret: Interpret, tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path, architecture, **settings)
    expected_ids, _, _ = interpret(generate, tmp_path, None)
    ids, recorders = interpret(generate_by_two, tmp_path)
    assert [(each.num_captured, each.num_replayed) for each in recorders] == [(8, NUM_REPLAYED)] * 2
    assert ids == expected_ids
