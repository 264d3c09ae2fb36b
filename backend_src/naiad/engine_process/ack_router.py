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
        self._senders: dict[Path, AckSender] = {}

    def send(self, sequence_id: int, num_chunks: int, is_cancelled: bool) -> None:
        """Send; never blocks, never raises for an instance that is gone."""
        path = Instance(self._directory, self._model, instance_number(sequence_id)).ack_socket
        sender = self._senders.get(path)
        if sender is None:
            self._forget_the_gone()
            sender = self._senders[path] = AckSender(path)
        sender.send(sequence_id, num_chunks, is_cancelled)

    def close(self) -> None:
        """Close the connections."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _forget_the_gone(self) -> None:
        for path in [path for path in self._senders if not path.exists()]:
            self._senders.pop(path).close()
