"""Refuses requests at once when the queue is full, without waiting for the running step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from naiad.errors import QUEUE_IS_FULL, InvalidRequestError, UnavailableError
from naiad.scheduler.admission import check_beam_width
from naiad.sequence import EngineRequest


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many sequences and tokens may wait.

    Attributes:
        max_num_seqs: maximum number of sequences that run at the same time.
        max_queued_requests: maximum number of sequences that wait.
        max_queued_tokens: maximum number of prompt tokens of waiting sequences; 0: no limit. One
            prompt may always wait.
    """

    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int = 0

    @property
    def max_inside(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self.max_num_seqs + self.max_queued_requests


class QueueGate:
    """Counts the sequences that run or wait. The I/O thread admits them, the engine's thread removes them."""

    def __init__(self, limits: QueueLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._closed_because = ""
        self._lock = threading.Lock()
        self._num_inside = 0
        self._num_tokens_on_the_way = 0
        self._num_waiting_tokens = 0

    @property
    def num_inside(self) -> int:
        """Number of sequences that run or wait."""
        with self._lock:
            return self._num_inside

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Admit all sequences of these requests, or none.

        Raises:
            InvalidRequestError: they would not fit even if no other sequence were there.
            UnavailableError: there is no room now, or the gate is closed.
        """
        limits = self._limits
        num_sequences, num_tokens = _num_sequences(requests), _num_tokens(requests)
        self._check(requests, num_sequences)
        with self._lock:
            if self._closed_because:
                raise UnavailableError(self._closed_because)
            if self._num_inside + num_sequences > limits.max_inside:
                raise UnavailableError(
                    f"{QUEUE_IS_FULL}: {self._num_inside} sequences run or wait, at most "
                    f"{limits.max_inside} may (max_num_seqs = {limits.max_num_seqs}, "
                    f"max_queued_requests = {limits.max_queued_requests})"
                )
            waiting = self._num_waiting_tokens + self._num_tokens_on_the_way
            if limits.max_queued_tokens and 0 < waiting > limits.max_queued_tokens - num_tokens:
                raise UnavailableError(
                    f"{QUEUE_IS_FULL}: {waiting} prompt tokens wait and {num_tokens} more would come, "
                    f"at most {limits.max_queued_tokens} may (max_queued_tokens)"
                )
            self._num_inside += num_sequences
            self._num_tokens_on_the_way += num_tokens

    def close(self, reason: str) -> None:
        """Refuse all further requests, for this reason."""
        with self._lock:
            self._closed_because = reason

    def leave(self, num_sequences: int = 1) -> None:
        """Record that sequences have ended."""
        with self._lock:
            self._num_inside -= num_sequences

    def arrived(self, requests: Sequence[EngineRequest], num_waiting_tokens: int) -> None:
        """Record that the engine has taken these requests.

        Args:
            requests: the requests, as they were admitted.
            num_waiting_tokens: number of prompt tokens that wait in the engine now.
        """
        with self._lock:
            self._num_tokens_on_the_way -= _num_tokens(requests)
            self._num_waiting_tokens = num_waiting_tokens

    def _check(self, requests: Sequence[EngineRequest], num_sequences: int) -> None:
        """Refuse requests that never fit, with an error that does not suggest trying again."""
        limits = self._limits
        if num_sequences > limits.max_inside:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences at once, its prompts times "
                f"n, num_return_sequences or beam_width: expected at most {limits.max_inside} "
                f"(max_num_seqs = {limits.max_num_seqs} and "
                f"max_queued_requests = {limits.max_queued_requests})"
            )
        for request in requests:
            check_beam_width(request, limits.max_num_seqs)


def _num_sequences(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.sequence_ids) for request in requests)


def _num_tokens(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.prompt_token_ids) * len(request.sequence_ids) for request in requests)
