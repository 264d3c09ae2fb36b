"""Which parameters of a request, an input or an output do not pass, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterable

from naiad.gate.refusal import RefusedError

_SHARED_MEMORY = "shared_memory_"
# Release 24.10 divides by zero when it classifies text.
_CLASSIFICATION = "classification"
# Triton's own; clients may know of one.
_RESERVED = "triton_"
_OPEN = "triton_enable_empty_final_response"


def check_request_parameters(names: Iterable[str]) -> None:
    """Refuse what a request may not have, nor any of its tensors.

    Raises:
        RefusedError: it has a parameter that does not pass.
    """
    for name in names:
        if name.startswith(_RESERVED) and name != _OPEN:
            raise _refused(name, "it is reserved for the server")


def check_input_parameters(names: Iterable[str]) -> None:
    """Refuse what an input may not have.

    Raises:
        RefusedError: it has a parameter that does not pass.
    """
    names = list(names)
    check_request_parameters(names)
    for name in names:
        if name.startswith(_SHARED_MEMORY):
            raise _refused(name, "inputs come with their request, not from shared memory")


def check_output_parameters(names: Iterable[str]) -> None:
    """Refuse what an output may not have.

    Raises:
        RefusedError: it has a parameter that does not pass.
    """
    names = list(names)
    check_request_parameters(names)
    for name in names:
        if name == _CLASSIFICATION:
            raise _refused(f"{name} (class_count)", "no output of a language model has classes")
        if name.startswith(_SHARED_MEMORY):
            raise _refused(name, "outputs come with their response, not in shared memory")


def _refused(name: str, reason: str) -> RefusedError:
    return RefusedError(400, f"the parameter {name[:80]} does not pass the gate: {reason}")
