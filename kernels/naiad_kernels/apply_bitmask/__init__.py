"""Makes the tokens impossible that a bitmask does not allow."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from naiad_kernels.apply_bitmask import reference
from naiad_kernels.staging import Staging

__all__ = ["apply_bitmask"]


def apply_bitmask(logits: torch.Tensor, rows: Sequence[int], allowed: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to −inf, in place.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        rows: different indices of rows of `logits`, at least one.
        allowed: `[len(rows), num_words]` int32 on the host, `num_words` ≥ vocab_size / 32: token i is allowed
            in a row if bit i % 32 of word i // 32 is set.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert allowed.dtype == torch.int32, allowed.dtype
    assert allowed.shape[0] == len(rows), (allowed.shape, len(rows))
    assert allowed.shape[1] * 32 >= logits.shape[1], (allowed.shape, logits.shape)
    if logits.device.type == "cuda":
        from naiad_kernels.apply_bitmask import kernel

        places, words = _to_device(rows, allowed, logits.device)
        kernel.apply_bitmask(logits, places, words)
    elif logits.is_contiguous():
        _apply_on_host(logits, rows, allowed)
    else:
        reference.apply_bitmask(logits, torch.tensor(rows), allowed)


def _apply_on_host(logits: torch.Tensor, rows: Sequence[int], allowed: torch.Tensor) -> None:
    # A byte's eight limits come from a table: a tenth of the time of unpacking bits and masking by them.
    limits, vocab_size = _limits_of_bytes(), logits.shape[1]
    values, words = logits.numpy(), allowed.numpy().view(np.uint8)
    for row, packed in zip(rows, words, strict=True):
        limit = limits.take(packed, axis=0).reshape(-1)[:vocab_size]
        np.fmin(values[row], limit, out=values[row])


@functools.cache
def _limits_of_bytes() -> npt.NDArray[np.float32]:
    """Return `[256, 8]`: for each bit of a byte what `fmin` of a logit needs.

    NaN leaves the logit as it is, and −inf replaces it, also if it is NaN.
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32("nan"), np.float32("-inf"))


def _to_device(
    rows: Sequence[int], allowed: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy rows and words in one copy."""
    staging = Staging(Staging.bytes_for([len(rows)], [allowed.numel()]), device)
    places = staging.put(rows, torch.int64)
    words = staging.put(allowed.numpy().reshape(-1), torch.int32)
    staging.send()
    return places, words.view(allowed.shape)
