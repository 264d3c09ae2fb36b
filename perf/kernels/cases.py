"""A measured case: an op on a shape, a check of its result, and rival implementations."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], torch.Tensor]

# Root mean square of the difference, relative to that of the values. The exact tolerances of kernels are
# asserted by tests; this detects calls that compute something else.
_MAX_DIFFERENCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Rival:
    """Another implementation.

    Attributes:
        run: computes the op; None: it is not installed.
        computes_the_same: whether its result is compared with ours.
    """

    run: Run | None
    computes_the_same: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """An op on a shape.

    Attributes:
        op, shape: their names in the table.
        run: computes the op with our kernel.
        check: checks the result of `run`; raises `WrongResultError`.
        rivals: other implementations by name.
        num_bytes: bytes that must be read or written, each once; 0: not relevant.
        flops: operations that must be computed; 0: not relevant.
        logits_bytes: bytes of the logits that are sampled from; 0: none.
        target: a key of `TARGETS`, or "".
    """

    op: str
    shape: str
    run: Run
    check: Callable[[torch.Tensor], None]
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    num_bytes: int = 0
    flops: int = 0
    logits_bytes: int = 0
    target: str = ""


class WrongResultError(Exception):
    """The result of an op, or of a rival that computes the same, is wrong."""


def assert_agrees(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare in float32.

    Raises:
        WrongResultError: the difference is more than rounding explains.
    """
    if not expected.is_floating_point():
        if not torch.equal(actual.cpu(), expected.cpu()):
            raise WrongResultError(f"{what}: other integers than expected")
        return
    difference = (actual.cpu().float() - expected.cpu().float()).square().mean().sqrt()
    relative = float(difference / expected.cpu().float().square().mean().sqrt().clamp_min(1e-30))
    most = _MAX_DIFFERENCE[expected.dtype]
    if not relative <= most:
        raise WrongResultError(
            f"{what}: differs by {relative:.1e} of the values, expected at most {most:.0e}"
        )


def equals(what: str, expected: Run) -> Callable[[torch.Tensor], None]:
    """Make a check against the whole result of a reference."""
    return lambda actual: assert_agrees(what, actual, expected())


def all_equal(
    what: str, run: Callable[[], Sequence[torch.Tensor]], expected: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[torch.Tensor], None]:
    """Make a check of an op that has several outputs: it runs once more, and each of them is compared.

    Args:
        what: name of the op.
        run: computes all outputs; the first one is the result that is also checked as it is.
        expected: what they should be.
    """

    def check(actual: torch.Tensor) -> None:
        wanted = expected()
        assert_agrees(what, actual, wanted[0])
        for number, (found, right) in enumerate(zip(run(), wanted, strict=True)):
            assert_agrees(f"{what}, output {number}", found, right)

    return check


def optional_module(name: str) -> Any:
    """Import a module; None: it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def num_bytes(*tensors: torch.Tensor) -> int:
    """The size of all tensors together, in bytes."""
    return sum(each.numel() * each.element_size() for each in tensors)
