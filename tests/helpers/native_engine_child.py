"""The engine process with a real engine, in which a prompt of `LOST_ID` makes a thread miss a share."""

from __future__ import annotations

import sys

from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.engine_process.__main__ import parse
from naiad.engine_process.protocol import Checkpoint
from naiad.engine_process.serving.loop import serve
from naiad.engine_process.serving.queue_gate import QueueLimits
from naiad.model_runner import ModelRunner
from naiad.sequence import EngineRequest

LOST_ID = 77


class LosingEngine(Engine):
    """Loses a member of its team on demand."""

    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        if request.prompt_token_ids[0] == LOST_ID:
            assert isinstance(self._model_runner, ModelRunner)
            assert self._model_runner._team is not None
            self._model_runner._team.lose_share()


def build(config: EngineConfig) -> Engine:
    engine = build_engine(config)
    engine.__class__ = LosingEngine
    return engine


def main() -> None:
    config, socket_path, parent_pid = parse(sys.argv[1:])
    limits = QueueLimits(config.max_num_seqs, config.max_queued_requests)
    serve(lambda: build(config), socket_path, parent_pid, limits, Checkpoint.of(config))


if __name__ == "__main__":
    main()
