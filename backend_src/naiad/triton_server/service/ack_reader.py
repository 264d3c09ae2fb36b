"""Reads the detokenizer's acknowledgements, mostly by threads that are awake anyway.

To wake a thread costs more than to read a message, and an acknowledgement is rarely urgent: it comes while
the next token is computed. So what has come is taken with each message of the engine and in each round of
housekeeping, and a thread waits only while something can not go on without the next one.
"""

from __future__ import annotations

import threading

from naiad.engine_process import AckReceiver
from naiad.triton_server.service.llm_service import LLMService

_POLL_S = 0.5


class AckReader:
    """Gives a service the acknowledgements of one receiver."""

    def __init__(self, receiver: AckReceiver, service: LLMService) -> None:
        """Start the thread, and have the service ask for what has come."""
        self._receiver = receiver
        self._service = service
        self._is_wanted = threading.Event()
        self._is_stopping = False
        service.read_acks = self._read
        service.want_acks = self._is_wanted.set
        self._thread = threading.Thread(target=self._run, name="naiad-acks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the receiver."""
        self._is_stopping = True
        self._is_wanted.set()
        self._thread.join(timeout=5)
        self._service.read_acks = self._service.want_acks = lambda: None
        self._receiver.close()

    def _read(self) -> None:
        self._service.take_acks(self._receiver.receive())

    def _run(self) -> None:
        while not self._is_stopping:
            self._is_wanted.wait()
            self._is_wanted.clear()
            while self._service.needs_acks and not self._is_stopping:
                self._service.take_acks(self._receiver.receive(_POLL_S))
