"""Random numbers without a generator: noise is a function of seed, position and token id.

So a row's draws do not depend on its place in the batch, on other rows, on preemptions, or on which
part of the vocabulary is considered.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): the counter's step and the finalizer's two factors.
_STEP, _FACTOR_1, _FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIFORM_BITS = 53


def noise_key(seed: int, position: int) -> int:
    """The key of one row at one position, as a signed 64-bit number.

    Args:
        seed: 0 … 2**64 - 1.
        position: the position of the token that is drawn, ≥ 0.
    """
    return stream_key(noise_stream(seed), position)


def noise_stream(seed: int) -> int:
    """The part of the key that all positions of a row share, to be computed once."""
    return _mix((seed + _STEP) & _BITS)


def stream_key(stream: int, position: int) -> int:
    """Compute `noise_key` from a row's `noise_stream`."""
    return _signed(_mix((stream + (position + 1) * _STEP) & _BITS))


def sibling_seed(seed: int, index: int) -> int:
    """The seed of one of several sequences from one prompt; the first one has the request's own.

    Args:
        seed: the request's seed, 0 … 2**64 - 1.
        index: the sequence's index, 0 = the first.
    """
    return _mix((seed + index * _STEP) & _BITS) if index else seed


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Compute each token's standard Gumbel noise.

    Args:
        keys: [num_rows, 1] int64, each from `noise_key`.
        token_ids: [num_rows, n] or [n] int64.

    Returns:
        [num_rows, n] float64, finite.
    """
    bits = token_ids * _signed(_STEP) + keys
    for shift, factor in ((30, _FACTOR_1), (27, _FACTOR_2)):
        bits.bitwise_xor_(_logical_shift(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_logical_shift(bits, 31))
    uniform = _logical_shift(bits, 64 - _UNIFORM_BITS).to(torch.float64)
    # The largest noise comes from the smallest uniforms, where floats are densest: the tail that
    # decides which token is drawn keeps its resolution.
    # A half more than the largest number rounds up to 1, of which the noise is not finite.
    uniform.add_(0.5).mul_(2.0**-_UNIFORM_BITS).clamp_(max=1 - 2.0**-_UNIFORM_BITS)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _logical_shift(bits: Tensor, shift: int) -> Tensor:
    """Right shift that fills with zeros; torch's repeats the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * _FACTOR_1) & _BITS
    bits = ((bits ^ (bits >> 27)) * _FACTOR_2) & _BITS
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
