"""Stand-ins for tensors: what a forward pass is called with to be written down instead of computed.

A public op that is `recordable` gives a call whose first argument is a `Traced` to that one's recorder. So a
model's forward pass is its only description: run with tensors it computes, run with stand-ins it is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class NotRecordableError(Exception):
    """The forward pass does something that no record can do; the text names it."""


class Recorder(Protocol):
    """What writes ops down."""

    def record(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write one call down.

        Args:
            op: name of the public op.
            args: arguments of the call; stand-ins among them belong to this recorder.
            kwargs: keyword arguments of the call.

        Returns:
            Stand-ins for what the op returns.
        """


class Traced:
    """Stands in for a tensor `[num_tokens, ...]` on a CPU.

    Attributes:
        recorder: writes down what is done with it.
        dtype, device: as of a tensor.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, recorder: Recorder) -> None:
        """Belong to a recorder."""
        self.recorder = recorder

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a tensor has and a stand-in has not."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotRecordableError(f"Tensor.{name} has no record")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse torch's own functions."""
        raise NotRecordableError(f"{getattr(func, '__name__', func)} has no record")


def recordable(op: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let a public op be recorded if its first argument is a stand-in."""

    @functools.wraps(op)
    def computed_or_recorded(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if args and isinstance(args[0], Traced):
            return cast(_Result, args[0].recorder.record(op.__name__, args, kwargs))
        return op(*args, **kwargs)

    return computed_or_recorded
