"""The detokenizer's end of the acknowledgements, where `llm` may have more than one instance."""

from __future__ import annotations

from pathlib import Path

from naiad.engine_process.acks import AckSender
from naiad.engine_process.instance import Instance, instance_number


class AckRouter:
    """Sends each acknowledgement to the instance whose sequence it is for. For one thread."""

    def __init__(self, directory: Path, model: str) -> None:
        """Take the runtime directory, and the name of the `llm` model."""
        self._directory = directory
        self._model = model
        self._senders: dict[int, AckSender] = {}

    def send(self, sequence_id: int, num_chunks: int, is_cancelled: bool) -> None:
        """Send; never blocks, never raises for an instance that is gone."""
        number = instance_number(sequence_id)
        sender = self._senders.get(number)
        if sender is None:
            self._forget_the_gone()
            sender = self._senders[number] = AckSender(self._path(number))
        sender.send(sequence_id, num_chunks, is_cancelled)

    def close(self) -> None:
        """Close the connections."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _forget_the_gone(self) -> None:
        for number in [number for number in self._senders if not self._path(number).exists()]:
            self._senders.pop(number).close()

    def _path(self, number: int) -> Path:
        return Instance(self._directory, self._model, number).ack_socket
