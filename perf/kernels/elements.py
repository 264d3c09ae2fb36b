"""Memory-bound ops: norms, activations, rotary embedding, writes to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from perf.kernels.cases import Case, Rival, Run, all_equal, equals, num_bytes
from perf.kernels.sizes import Sizes
from torch.nn import functional as F

from naiad_kernels.gelu_and_mul import gelu_and_mul
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rms_norm import reference as norm_reference
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.rotary import rotary, rotary_angles
from naiad_kernels.rotary_store_kv import reference as fused_reference
from naiad_kernels.rotary_store_kv import rotary_store_kv
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache, Slots, store_kv

_EPS = 1e-5
_MANY_TOKENS = 2_048


def element_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Each op for each number of tokens."""
    for num_tokens in sizes.num_tokens:
        yield from _norms(sizes, device, num_tokens)
        yield from _activations(sizes, device, num_tokens)
        yield from _cache_ops(sizes, device, num_tokens)


def _norms(sizes: Sizes, device: torch.device, num_tokens: int) -> Iterator[Case]:
    x, residual, weight = (
        torch.randn(*shape, device=device).to(sizes.dtype)
        for shape in ((num_tokens, sizes.hidden_size), (num_tokens, sizes.hidden_size), (sizes.hidden_size,))
    )
    shape, target = f"{num_tokens} × {sizes.hidden_size}", _target(num_tokens)
    yield Case(
        op="rms_norm",
        shape=shape,
        run=lambda: rms_norm(x, weight, _EPS),
        check=equals("rms_norm", lambda: norm_reference.rms_norm(x, weight, _EPS)),
        rivals=_torch(lambda: F.rms_norm(x, weight.shape, weight, _EPS)),
        num_bytes=2 * num_bytes(x),
        target=target,
    )
    yield Case(
        op="add_rms_norm",
        shape=shape,
        run=lambda: add_rms_norm(x, residual, weight, _EPS)[0],
        check=all_equal(
            "add_rms_norm",
            lambda: add_rms_norm(x, residual, weight, _EPS),
            lambda: norm_reference.add_rms_norm(x, residual, weight, _EPS),
        ),
        rivals=_torch(lambda: F.rms_norm(x + residual, weight.shape, weight, _EPS)),
        num_bytes=4 * num_bytes(x),
        target=target,
    )


def _activations(sizes: Sizes, device: torch.device, num_tokens: int) -> Iterator[Case]:
    gate_up = torch.randn(num_tokens, 2 * sizes.intermediate_size, device=device).to(sizes.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    ops: dict[str, tuple[Run, Run, Run]] = {
        "silu_and_mul": (
            lambda: silu_and_mul(gate_up),
            lambda: silu_reference.silu_and_mul(gate_up),
            lambda: F.silu(gate) * up,
        ),
        "gelu_and_mul": (
            lambda: gelu_and_mul(gate_up, "tanh"),
            lambda: gelu_reference.gelu_and_mul(gate_up, "tanh"),
            lambda: F.gelu(gate, approximate="tanh") * up,
        ),
    }
    for op, (run, expected, rival) in ops.items():
        yield Case(
            op=op,
            shape=f"{num_tokens} × {sizes.intermediate_size}",
            run=run,
            check=equals(op, expected),
            rivals=_torch(rival),
            num_bytes=num_bytes(gate_up) * 3 // 2,
            target=_target(num_tokens),
        )


def _cache_ops(sizes: Sizes, device: torch.device, num_tokens: int) -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim = sizes.heads
    num_rotated = num_heads + num_kv_heads
    heads = torch.randn(num_tokens, num_rotated + num_kv_heads, head_dim, device=device).to(sizes.dtype)
    rotated, key, value = heads[:, :num_rotated], heads[:, num_heads:num_rotated], heads[:, num_rotated:]
    frequencies = torch.rand(head_dim // 2, device=device)
    angles = rotary_angles(torch.arange(num_tokens, device=device), frequencies, sizes.dtype)
    num_blocks = -(-num_tokens // sizes.block_size)
    rows = (num_blocks, num_kv_heads, sizes.block_size, head_dim)
    ours, theirs = (
        LayerCache(*(torch.zeros(rows, dtype=sizes.dtype, device=device) for _ in range(2))) for _ in range(2)
    )
    order = torch.randperm(num_blocks * sizes.block_size, device=device)[:num_tokens]
    slots = Slots.from_slot_mapping(order, sizes.block_size)
    shape = f"{num_tokens} × {num_heads}/{num_kv_heads} × {head_dim}"

    def store() -> torch.Tensor:
        store_kv(key, value, ours, slots)
        return ours.key

    def store_by_index() -> torch.Tensor:
        theirs.key[slots.blocks, :, slots.offsets] = key
        theirs.value[slots.blocks, :, slots.offsets] = value
        return theirs.key

    yield Case(
        op="rotary",
        shape=shape,
        run=lambda: rotary(rotated, *angles),
        check=equals("rotary", lambda: rotary_reference.rotary(rotated, *angles)),
        rivals=_torch(lambda: rotated * angles[0] + rotated.roll(head_dim // 2, -1) * angles[1]),
        num_bytes=2 * num_bytes(rotated, angles[0]),
    )
    yield Case(
        op="store_kv",
        shape=shape,
        run=store,
        check=all_equal("store_kv", lambda: _stored(store, ours), lambda: _stored(store_by_index, theirs)),
        rivals=_torch(store_by_index),
        num_bytes=2 * num_bytes(key, value),
    )
    yield _fused_case(heads, angles, (ours, theirs), slots, shape)


def _fused_case(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[LayerCache, LayerCache],
    slots: Slots,
    shape: str,
) -> Case:
    ours, theirs = caches

    def run() -> torch.Tensor:
        return rotary_store_kv(heads, angles, None, ours, slots)

    def expected() -> torch.Tensor:
        return fused_reference.rotary_store_kv(heads, angles, (None, _EPS), theirs, slots)

    return Case(
        op="rotary_store_kv",
        shape=shape,
        run=run,
        check=all_equal("rotary_store_kv", lambda: _stored(run, ours), lambda: _stored(expected, theirs)),
        num_bytes=2 * num_bytes(heads, angles[0]),
    )


def _stored(run: Run, cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """What an op returns, and what it has put into an empty cache."""
    cache.key.zero_()
    cache.value.zero_()
    return run(), cache.key, cache.value


def _torch(run: Run) -> dict[str, Rival]:
    """Torch code as a rival, on a GPU also compiled; on a CPU compiling is not worth it for a few calls."""
    rivals = {"torch": Rival(run)}
    if run().is_cuda:
        compiled: Callable[[], torch.Tensor] = torch.compile(run)
        rivals["torch.compile"] = Rival(compiled)
    return rivals


def _target(num_tokens: int) -> str:
    return "element-wise" if num_tokens >= _MANY_TOKENS else ""
