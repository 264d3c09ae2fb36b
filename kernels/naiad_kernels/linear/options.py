"""`LoadOptions`: what every weight of a model is loaded and laid out for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """One value that is passed once, from the runner to the last linear layer.

    Attributes:
        dtype: the model computes in it.
        device: the model computes on it.
        batch_invariant: on a GPU, a token's result must not depend on the other tokens of the step,
            to the last bit.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_invariant: bool = False
