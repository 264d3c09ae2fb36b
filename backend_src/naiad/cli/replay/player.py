"""Sends requests to an engine at their times, and collects what they give."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from naiad.cli.replay.played import PlayedRequest
from naiad.errors import StartupError
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest


class PlayedEngine(Protocol):
    """The part of an engine client that the player uses."""

    def submit(self, requests: list[EngineRequest]) -> None:
        """Send requests to the engine."""


@dataclass(slots=True)
class Played:
    """What a request gave.

    Attributes:
        asked: the request.
        submitted_s: when it was sent, on the monotonic clock.
        token_ids: the ids of each of its sequences.
        num_open: sequences that have not ended.
        first_token_s: when its first token came; None: none has.
        errors: the messages of errors.
    """

    asked: PlayedRequest
    submitted_s: float
    token_ids: list[list[int]]
    num_open: int
    first_token_s: float | None = None
    errors: list[str] = field(default_factory=list)


class Player:
    """Plays requests; the engine client's dispatcher thread calls `take_outputs` and `lose`."""

    def __init__(self) -> None:
        """Start without requests."""
        self._changed = threading.Condition()
        self._played: dict[int, tuple[Played, int]] = {}
        self._num_open = 0
        self._is_lost = False

    def take_outputs(self, outputs: list[RequestOutput], _stats: EngineStats | None) -> None:
        """Take the engine's outputs."""
        now_s = time.monotonic()
        with self._changed:
            for output in outputs:
                played, index = self._played[output.sequence_id]
                played.token_ids[index] += output.token_ids
                if output.token_ids and played.first_token_s is None:
                    played.first_token_s = now_s
                if output.error_message:
                    played.errors.append(output.error_message)
                if output.finish_reason is not None:
                    played.num_open -= 1
                    self._num_open -= 1
            self._changed.notify()

    def lose(self) -> None:
        """The engine's process has ended."""
        with self._changed:
            self._is_lost = True
            self._changed.notify()

    def play(
        self, engine: PlayedEngine, requests: Iterable[PlayedRequest], vocab_size: int, speed: float
    ) -> Sequence[Played]:
        """Send all requests and wait until they have ended.

        Args:
            engine: serves.
            requests: in the order of their times.
            vocab_size: prompts that are made up have ids below it.
            speed: 2 = twice as fast as recorded.

        Raises:
            StartupError: the engine's process has ended.
        """
        made: list[Played] = []
        begin_s = time.monotonic()
        for asked in requests:
            prompt = asked.request.prompt_token_ids
            if asked.lengths is not None:
                prompt = asked.lengths.draw(vocab_size)
            time.sleep(max(0.0, begin_s + asked.due_s / speed - time.monotonic()))
            made.append(self._send(engine, asked, prompt))
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0 or self._is_lost)
            self._check()
        return made

    def _send(self, engine: PlayedEngine, asked: PlayedRequest, prompt: list[int]) -> Played:
        num_sequences = asked.num_sequences
        played = Played(asked, time.monotonic(), [[] for _ in range(num_sequences)], num_sequences)
        with self._changed:
            self._check()
            first_id = len(self._played) + 1
            ids = range(first_id, first_id + num_sequences)
            for index, sequence_id in enumerate(ids):
                self._played[sequence_id] = played, index
            self._num_open += num_sequences
        engine.submit(
            [
                msgspec.structs.replace(
                    asked.request, sequence_id=first_id, sibling_ids=tuple(ids[1:]), prompt_token_ids=prompt
                )
            ]
        )
        return played

    def _check(self) -> None:
        if self._is_lost:
            raise StartupError("the engine's process has ended")
