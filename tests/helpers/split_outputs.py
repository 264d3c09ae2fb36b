"""What the outputs of a request hold, for models that several processes share."""

from __future__ import annotations

import torch

from naiad.outputs import RequestOutput


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    """The new tokens."""
    return [each for output in outputs for each in output.token_ids]


def logits_of(outputs: list[RequestOutput]) -> torch.Tensor:
    """The logits of the prompt and of the new tokens, one row after the other; a zero if there are none."""
    parts = [output.context_logits for output in outputs]
    parts += [each for output in outputs for each in output.generation_logits]
    return torch.frombuffer(bytearray(b"".join(parts) or bytes(4)), dtype=torch.float32)
