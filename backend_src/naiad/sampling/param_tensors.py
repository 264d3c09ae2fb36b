"""Converts a request's long lists to tensors once instead of in every step."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from naiad_kernels.staging import Staging

T = TypeVar("T")
# Each entry may take some bytes per token of the vocabulary.
_MAX_CACHED = 64


class ById(Generic[T]):
    """A cache key that compares by the identity of its object, so hashing is fast.

    A cache that holds a key also holds its object, so no other object can get the same address.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        """Make the key of `value`."""
        self.value = value

    def __hash__(self) -> int:
        """Hash the address."""
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        """Whether both are keys of one object."""
        return isinstance(other, ById) and self.value is other.value


@lru_cache(_MAX_CACHED)
def bias_tensors(key: ById[tuple[tuple[int, float], ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Convert (id, value) pairs, at least one, to ids [n] int64 and values [n] float32; read-only."""
    token_ids, values = zip(*key.value, strict=True)
    staging = Staging(Staging.bytes_for([len(values)] * 2, []), device)
    ids, wide = staging.put(token_ids, torch.int64), staging.put(values, torch.float64)
    staging.send()
    return ids, wide.float()


@lru_cache(_MAX_CACHED)
def excluded_mask(key: ById[tuple[int, ...]], vocab_size: int, device: torch.device) -> Tensor:
    """Return [vocab_size] bool, true for the ids that are not listed; read-only."""
    staging = Staging(Staging.bytes_for([len(key.value)], []), device)
    token_ids = staging.put(key.value, torch.int64)
    staging.send()
    return torch.ones(vocab_size, dtype=torch.bool, device=device).index_fill_(0, token_ids, False)
