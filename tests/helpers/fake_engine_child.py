"""The engine process with a fake engine: a sequence with the prompt [p, …] gets the tokens p, p + 1, …

Run as a script through `EngineClient(command=[python, this file, behaviour])`.
Special first prompt ids make it misbehave; see the constants.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import logging
import os
import selectors
import socket
import time
from pathlib import Path
from typing import Any

from naiad.engine_process.protocol import Checkpoint
from naiad.engine_process.serving.connections import Connection
from naiad.engine_process.serving.loop import serve
from naiad.engine_process.serving.queue_gate import QueueLimits
from naiad.errors import InvalidRequestError, ModelError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason, GrammarSpec
from naiad.snapshot import EngineSnapshot, SequenceRow
from naiad.usage import TenantUsage

REFUSED_ID = 900
FAILING_ID = 901
STUCK_ID = 902
SLOW_ID = 903
LAST_ID = 904  # a token that an aborted sequence had held back
HELD_ID = 905  # runs slowly until `let_go`
LONG_ID = 906  # its only step lasts until `let_go`
_LET_GO = "let-go"
_LONG_STEP = "long-step"


def let_go(model_dir: Path) -> None:
    """End the held sequences as if they had all of their tokens."""
    (model_dir / _LET_GO).touch()


def is_in_long_step(model_dir: Path) -> bool:
    """Whether the engine's thread computes a step that lasts until `let_go`."""
    return (model_dir / _LONG_STEP).exists()


class FakeModel:
    vocab_size = 1000
    eos_token_ids = (2, 3)


class FakeGrammars:
    """Refuses the source "bad"; compiles "held" until `let_go`, and raises a bug for "bug"."""

    def __init__(self, let_go: Path) -> None:
        self._let_go = let_go

    def find(self, spec: GrammarSpec) -> None:
        return None

    def get(self, spec: GrammarSpec) -> object:
        if spec.source == "bad":
            raise InvalidRequestError("grammar: refused")
        if spec.source == "bug":
            raise KeyError("a secret detail")
        while spec.source == "held" and not self._let_go.exists():
            time.sleep(0.005)
        return object()


class FakeEngine:
    max_model_len = 64
    model_config = FakeModel()

    def __init__(self, model_dir: Path) -> None:
        self._let_go, self._long_step = model_dir / _LET_GO, model_dir / _LONG_STEP
        self.grammars: Any = FakeGrammars(self._let_go)
        self._live: dict[int, EngineRequest] = {}
        self._num_done: dict[int, int] = {}
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_waiting_tokens(self) -> int:
        return 0

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[0] == REFUSED_ID:
            raise InvalidRequestError("prompt: refused")
        for sequence_id in request.sequence_ids:
            self._live[sequence_id] = request
            self._num_done[sequence_id] = 0

    def abort(self, sequence_id: int) -> RequestOutput | None:
        if self._live.pop(sequence_id, None) is None:
            return None
        return RequestOutput(sequence_id, [LAST_ID], finish_reason=FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        self._num_steps += 1
        firsts = {request.prompt_token_ids[0] for request in self._live.values()}
        if FAILING_ID in firsts:
            raise RuntimeError("a secret detail")
        if STUCK_ID in firsts:
            time.sleep(60)
        if firsts & {SLOW_ID, HELD_ID}:
            time.sleep(0.005)
        if LONG_ID in firsts:
            self._long_step.touch()
            while not self._let_go.exists():
                time.sleep(0.005)
        return [self._advance(sequence_id, request) for sequence_id, request in list(self._live.items())]

    def _advance(self, sequence_id: int, request: EngineRequest) -> RequestOutput:
        token_id = request.prompt_token_ids[0] + self._num_done[sequence_id]
        self._num_done[sequence_id] += 1
        if request.prompt_token_ids[0] in (HELD_ID, LONG_ID):
            is_last = self._let_go.exists()
        else:
            is_last = self._num_done[sequence_id] == request.params.max_tokens
        if is_last:
            del self._live[sequence_id]
        return RequestOutput(sequence_id, [token_id], finish_reason=FinishReason.LENGTH if is_last else None)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live), max_num_seqs=8, total_steps=self._num_steps)

    def usages(self) -> list[TenantUsage]:
        return []

    def snapshot(self) -> EngineSnapshot:
        rows = [
            SequenceRow(
                each, "", "decode", 0, 1, 1, self._num_done[each], request.params.max_tokens, 0, 0, 0, 0
            )
            for each, request in self._live.items()
        ]
        return EngineSnapshot(stats=self.stats(), rows=rows)


def build(behaviour: str, model_dir: str) -> FakeEngine:
    if behaviour == "no-model":
        raise ModelError(f"{model_dir} has no weights")
    if behaviour == "bug":
        raise KeyError("a secret detail")
    if behaviour == "never-ready":
        time.sleep(60)
    while behaviour == "starts-when-let-go" and not Path(model_dir, _LET_GO).exists():
        time.sleep(0.005)
    if behaviour == "fails-second-time":
        flag = Path(model_dir) / "started"
        if flag.exists():
            flag.unlink()
            raise ModelError("not this time")
        flag.touch()
    return FakeEngine(Path(model_dir))


def have_little_memory() -> None:
    """Have the kernel refuse two of three sends, as if it had no memory for them."""
    send, counter = socket.socket.send, itertools.count()

    def send_or_not(self: socket.socket, *args: Any) -> int:
        if next(counter) % 3 < 2:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return send(self, *args)

    setattr(socket.socket, "send", send_or_not)  # noqa: B010 — mypy lets no method be assigned


def have_few_watches() -> None:
    """Have the kernel refuse to watch the first connection that is not the owner's."""
    register, connections = selectors.EpollSelector.register, itertools.count()

    def register_or_not(self: selectors.EpollSelector, fileobj: Any, events: int, data: Any = None) -> Any:
        if isinstance(data, Connection) and next(connections) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return register(self, fileobj, events, data)

    setattr(selectors.EpollSelector, "register", register_or_not)  # noqa: B010 — as above


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--model-dir", required=True)
    options, _ = parser.parse_known_args()
    logging.basicConfig()
    if options.behaviour == "dies":
        raise SystemExit(7)
    if options.behaviour == "little-memory":
        have_little_memory()
    if options.behaviour == "few-watches":
        have_few_watches()
    limits = QueueLimits(max_num_seqs=8, max_queued_requests=1000, max_queued_tokens=1000)
    serve(
        lambda: build(options.behaviour, options.model_dir),
        options.socket,
        options.parent_pid,
        limits,
        Checkpoint(options.model_dir, "fake"),
    )


if __name__ == "__main__":
    main()
