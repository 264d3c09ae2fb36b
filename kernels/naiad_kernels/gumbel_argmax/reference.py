"""Reference for `gumbel_argmax`, in plain torch."""

from __future__ import annotations

import torch

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_UNIFORM_BITS = 53


def gumbel_argmax(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    threshold: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Compute the public op in float64."""
    scaled = (logits.double() - best[:, None]) / temperature[:, None]
    scores = scaled + gumbel_noise(keys, logits.shape[1])
    return scores.masked_fill(scaled < threshold[:, None], -torch.inf).argmax(dim=1)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token, `[num_rows, vocab_size]` float64."""
    uniform = uniform_noise(keys, torch.arange(vocab_size, device=keys.device))
    return -torch.log(-torch.log1p(-uniform))


def uniform_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform noise in (0, 1) for some tokens, `[num_rows, n]` float64: SplitMix64 of each id."""
    bits = token_ids * _STEP + keys[:, None]
    for shift, factor in _FACTORS:
        bits = (bits ^ _logical_shift(bits, shift)) * factor
    bits = bits ^ _logical_shift(bits, 31)
    uniform = (_logical_shift(bits, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS
    # A half more than the largest number rounds up to 1.
    return uniform.clamp(max=1 - 2.0**-_UNIFORM_BITS)


def _logical_shift(bits: torch.Tensor, shift: int) -> torch.Tensor:
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
