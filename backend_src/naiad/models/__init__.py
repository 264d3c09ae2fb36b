"""Forward passes, one readable file a family, and the safetensors they are loaded from."""

from __future__ import annotations

import torch

from naiad.config import ModelConfig
from naiad.models.layers import ForwardBatch
from naiad.models.llama import LlamaModel
from naiad.models.weights import Checkpoint

__all__ = ["Checkpoint", "ForwardBatch", "LlamaModel", "load_model"]


def load_model(
    directory: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
) -> LlamaModel:
    """Load the checkpoint of a directory; every supported architecture is of the Llama family.

    Args:
        directory: of the checkpoint.
        config: its shape.
        dtype: to compute in.
        device: to compute on.
        batch_invariant: see `prepare_linear`.

    Raises:
        ModelError: names the file and the tensor that are missing, damaged or misshapen.
    """
    return LlamaModel(config, Checkpoint(directory, dtype, device), device, batch_invariant)
