"""Helpers for tests of the engine process: a recorder of the client's callbacks, and a raw connection."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from naiad.engine_process.protocol import (
    ClientMessage,
    EngineMessage,
    encode_frame,
    engine_message_decoder,
)
from naiad.frames import FrameBuffer
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason, SamplingParams

FAKE_CHILD = Path(__file__).parent / "fake_engine_child.py"
# Shorter than the hang of the fake engine that hangs on purpose.
WAIT_S = 45.0


def fake_command(behaviour: str) -> list[str]:
    return [sys.executable, str(FAKE_CHILD), behaviour]


def make_request(
    sequence_id: int, first_id: int, max_tokens: int = 3, sibling_ids: tuple[int, ...] = ()
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(
        sequence_id=sequence_id, prompt_token_ids=[first_id], params=params, sibling_ids=sibling_ids
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that has not been reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


class Recorder:
    """Records the client's callbacks."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[RequestOutput]] = {}
        self.stats: list[EngineStats] = []
        self.num_losses = 0
        self._changed = threading.Condition()

    def on_outputs(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        with self._changed:
            for output in outputs:
                self.outputs.setdefault(output.sequence_id, []).append(output)
            if stats is not None:
                self.stats.append(stats)
            self._changed.notify_all()

    def on_lost(self) -> None:
        with self._changed:
            self.num_losses += 1
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "waited in vain"

    def wait_finished(self, *sequence_ids: int) -> None:
        self.wait_for(lambda: all(self.reason(sequence_id) for sequence_id in sequence_ids))

    def wait_started(self, sequence_id: int) -> None:
        self.wait_for(lambda: sequence_id in self.outputs)

    def reason(self, sequence_id: int) -> FinishReason | None:
        outputs = self.outputs.get(sequence_id, [])
        return outputs[-1].finish_reason if outputs else None

    def token_ids(self, sequence_id: int) -> list[int]:
        return [token_id for output in self.outputs[sequence_id] for token_id in output.token_ids]

    def num_finishes(self, sequence_id: int) -> int:
        return sum(output.finish_reason is not None for output in self.outputs[sequence_id])


class RawClient:
    """A client that may break the protocol."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "nobody listens"
                time.sleep(0.01)
        self._frames = FrameBuffer()
        self._messages: list[EngineMessage] = []

    def send(self, message: ClientMessage) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self) -> EngineMessage | None:
        """The next message; None at the end of the connection."""
        while not self._messages:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages = [engine_message_decoder.decode(body) for body in self._frames.feed(data)]
        return self._messages.pop(0)

    def close(self) -> None:
        self.socket.close()
