"""Refuses what the queue has no room for, at once: nobody waits for the running step to hear it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from naiad.errors import InvalidRequestError, UnavailableError
from naiad.scheduler.admission import check_beam_width
from naiad.sequence import EngineRequest

# The first words are those of the server's own queue, which clients look for.
_FULL = "Exceeds maximum queue size, the queue is full"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait.

    Attributes:
        max_num_seqs: sequences that run at the same time.
        max_queued_requests: sequences that may wait beside them.
        max_queued_tokens: prompt tokens of sequences that have not started; 0 = no bound. One
            prompt may always wait.
    """

    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int = 0

    @property
    def max_inside(self) -> int:
        """Sequences that run or wait, at most."""
        return self.max_num_seqs + self.max_queued_requests


class QueueGate:
    """Counts the sequences inside. The I/O thread lets them in, the engine's thread out."""

    def __init__(self, limits: QueueLimits) -> None:
        """Nobody is inside."""
        self._limits = limits
        self._closed_because = ""
        self._lock = threading.Lock()
        self._num_inside = 0
        self._num_tokens_on_the_way = 0
        self._num_waiting_tokens = 0

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Let all sequences of these requests in, or none.

        Raises:
            InvalidRequestError: they could not come in if nobody else were there.
            UnavailableError: they may not come in now.
        """
        limits = self._limits
        num_sequences, num_tokens = _num_sequences(requests), _num_tokens(requests)
        self._check(requests, num_sequences)
        with self._lock:
            if self._closed_because:
                raise UnavailableError(self._closed_because)
            if self._num_inside + num_sequences > limits.max_inside:
                raise UnavailableError(
                    f"{_FULL}: {self._num_inside} sequences run or wait, at most "
                    f"{limits.max_inside} may (max_num_seqs = {limits.max_num_seqs}, "
                    f"max_queued_requests = {limits.max_queued_requests})"
                )
            waiting = self._num_waiting_tokens + self._num_tokens_on_the_way
            if limits.max_queued_tokens and 0 < waiting > limits.max_queued_tokens - num_tokens:
                raise UnavailableError(
                    f"{_FULL}: {waiting} prompt tokens wait and {num_tokens} more would come, "
                    f"at most {limits.max_queued_tokens} may (max_queued_tokens)"
                )
            self._num_inside += num_sequences
            self._num_tokens_on_the_way += num_tokens

    def close(self, reason: str) -> None:
        """Let nobody in from now on, for this reason."""
        with self._lock:
            self._closed_because = reason

    def leave(self, num_sequences: int = 1) -> None:
        """Sequences have ended."""
        with self._lock:
            self._num_inside -= num_sequences

    def arrived(self, requests: Sequence[EngineRequest], num_waiting_tokens: int) -> None:
        """The engine has these requests now.

        Args:
            requests: as they entered.
            num_waiting_tokens: prompt tokens that wait in the engine now.
        """
        with self._lock:
            self._num_tokens_on_the_way -= _num_tokens(requests)
            self._num_waiting_tokens = num_waiting_tokens

    def _check(self, requests: Sequence[EngineRequest], num_sequences: int) -> None:
        """Nobody is to try again with what never fits."""
        limits = self._limits
        if num_sequences > limits.max_inside:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences at once, its prompts times "
                f"num_return_sequences or beam_width: expected at most {limits.max_inside} "
                f"(max_num_seqs = {limits.max_num_seqs} and "
                f"max_queued_requests = {limits.max_queued_requests})"
            )
        for request in requests:
            check_beam_width(request, limits.max_num_seqs)


def _num_sequences(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.sequence_ids) for request in requests)


def _num_tokens(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.prompt_token_ids) * len(request.sequence_ids) for request in requests)
