"""An `llm` model with a fault of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from perf.server.soak.faults import LEAK, LOST_END, WRONG_TOKEN

from naiad.triton_server.llm_model import LLMModel
from naiad.triton_server.models import pb

_LEAKED_BYTES = 64 << 10
# One request in so many has the fault.
_EVERY = 50


def faulty_llm_model(fault: str) -> type[LLMModel]:
    """Make the `llm` model, for the model.py of a repository.

    Args:
        fault: one of `FAULTS`.
    """
    module: Any = pb
    sender_class: type[Any] = _LeakySender if fault == LEAK else _sometimes(fault)
    module.TritonSender = sender_class
    return LLMModel


class _LeakySender(pb.TritonSender):
    """Keeps some memory of every request for ever."""

    _kept: ClassVar[list[bytearray]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Written, so that it is there.
        self._kept.append(bytearray(b"x" * _LEAKED_BYTES))


def _sometimes(fault: str) -> type[pb.TritonSender]:
    class Sender(pb.TritonSender):
        """Loses the end, or changes the ids, of one request in some."""

        num_made = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            type(self).num_made += 1
            self._is_chosen = type(self).num_made % _EVERY == 0

        def send(self, tensors: Any, *, final: bool) -> None:
            if self._is_chosen and fault == LOST_END and final:
                return
            if self._is_chosen and fault == WRONG_TOKEN and tensors and "output_ids" in tensors:
                tensors = tensors | {"output_ids": tensors["output_ids"] ^ 1}
            super().send(tensors, final=final)

    return Sender
