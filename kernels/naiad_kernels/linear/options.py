"""`LoadOptions`: how the weights of a model are loaded and laid out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model, passed from the runner to every linear layer.

    Attributes:
        dtype: the dtype in which the model computes.
        device: the device on which the model computes.
        batch_invariant: on a GPU, every bit of a token's result must be independent of the other tokens
            of the step.
        native: on a CPU, steps are recorded and run by the native kernels.
        quantization: how the weights of linear layers are rounded, for native kernels or with `packed`:
            "none", "int8", "int4", or, with `packed`, "fp8".
        packed: weights that a checkpoint has quantised are multiplied in the form that is stored, as
            the kernels for a GPU do, and are not rounded again.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_invariant: bool = False
    native: bool = False
    quantization: str = "none"
    packed: bool = False
