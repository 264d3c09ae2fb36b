"""The quantised linears on a GPU: one launch, or two if the inputs are split because tokens are few."""

from __future__ import annotations

import torch
import triton

from naiad_kernels.linear.quantised.kernel.byte import byte_kernel
from naiad_kernels.linear.quantised.kernel.plan import HOPPER, Plan, byte_tile, plan_product, w4_tile
from naiad_kernels.linear.quantised.kernel.tile import sum_slabs_kernel
from naiad_kernels.linear.quantised.kernel.tokens import quantize_tokens_kernel
from naiad_kernels.linear.quantised.kernel.w4 import w4a16_kernel
from naiad_kernels.linear.quantised.weights import INPUTS_PER_STEP, SPAN, ByteTokens, ByteWeight, W4Weight

_SUM_COLUMNS = 256
_MOST_REGISTERS = 255
_ELEMENTS_PER_WARP, _MAX_WARPS = 512, 16


def w4a16_linear(x: torch.Tensor, weight: W4Weight, plan: Plan | None = None) -> torch.Tensor:
    """Compute the public op; `plan` is for tests."""
    x = x if weight.input_order is None else x.index_select(1, weight.input_order)
    x = _with_dense_rows(x)
    num_rows, in_features = x.shape
    out_features = weight.out_features
    tile = w4_tile(num_rows, x.element_size(), _capability())
    plan = plan or plan_product(tile, num_rows, in_features, out_features)
    out, slabs = _buffers(x, plan, out_features, x.dtype)
    if num_rows == 0:
        return out
    grid = (plan.num_tiles(num_rows, out_features), plan.num_chunks if plan.is_split else 1)
    w4a16_kernel[grid](
        out, slabs, x, weight.words, weight.scales, weight.zeros, weight.bias,
        num_rows, in_features, out_features, plan.chunk_size, weight.group_size,
        x.stride(0), weight.words.stride(0),
        STEPS_PER_GROUP=min(SPAN, weight.group_size) // INPUTS_PER_STEP, IS_SPLIT=plan.is_split,
        TILE_ROWS=plan.tile.rows, TILE_COLUMNS=plan.tile.columns,
        num_warps=plan.tile.num_warps, num_stages=plan.tile.num_stages, enable_fp_fusion=True,
        maxnreg=_max_registers(x.dtype),
    )  # fmt: skip
    if slabs is not None:
        _sum_slabs(out, slabs, None, None, weight.bias)
    return out


def w8a16_linear(x: torch.Tensor, weight: ByteWeight, plan: Plan | None = None) -> torch.Tensor:
    """Compute the public op; `plan` is for tests."""
    return _byte_linear(x, None, weight, x.dtype, plan)


def w8a8_linear(
    tokens: ByteTokens, weight: ByteWeight, dtype: torch.dtype, plan: Plan | None = None
) -> torch.Tensor:
    """Compute the public op; `plan` is for tests."""
    _require_fp8("w8a8_linear", weight.values.dtype)
    return _byte_linear(tokens.values, tokens.scales, weight, dtype, plan)


def quantize_tokens(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, by_span: bool = False
) -> ByteTokens:
    """Compute the public op."""
    _require_fp8("quantize_tokens", dtype)
    x = _with_dense_rows(x)
    num_tokens, dim = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    group_size = SPAN if by_span else dim
    num_groups = triton.cdiv(dim, group_size)
    scales = torch.empty(num_groups, num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        tile_groups, tile_inputs = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
        num_warps = max(1, min(_MAX_WARPS, tile_groups * tile_inputs // _ELEMENTS_PER_WARP))
        quantize_tokens_kernel[(num_tokens,)](
            values, scales, x, x.stride(0), DIM=dim, GROUP_SIZE=group_size,
            TILE_GROUPS=tile_groups, TILE_INPUTS=tile_inputs, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return ByteTokens(values, scales if by_span else scales[0])


def has_fp8() -> bool:
    """Whether the GPU that kernels are compiled for multiplies FP8."""
    return _capability() >= HOPPER


def _capability() -> int:
    """The compute capability that kernels are compiled for: 90 for sm_90, also in the interpreter."""
    if triton.knobs.runtime.interpret:
        return HOPPER
    return int(triton.runtime.driver.active.get_current_target().arch)


def _byte_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor | None,
    weight: ByteWeight,
    dtype: torch.dtype,
    plan: Plan | None,
) -> torch.Tensor:
    x = _with_dense_rows(x)
    num_rows, in_features = x.shape
    out_features = weight.out_features
    has_groups = weight.group_size is not None
    tile = byte_tile(num_rows, x.element_size(), _capability(), has_groups)
    plan = plan or plan_product(tile, num_rows, in_features, out_features)
    assert not has_groups or plan.tile.inputs == SPAN, plan.tile
    out, slabs = _buffers(x, plan, out_features, dtype)
    if num_rows == 0:
        return out
    grid = (plan.num_tiles(num_rows, out_features), plan.num_chunks if plan.is_split else 1)
    byte_kernel[grid](
        out, slabs, x, weight.values, weight.scales, row_scales, weight.bias,
        num_rows, in_features, out_features, plan.chunk_size, weight.group_size, x.stride(0),
        IS_SPLIT=plan.is_split, TILE_ROWS=plan.tile.rows, TILE_COLUMNS=plan.tile.columns,
        TILE_INPUTS=plan.tile.inputs, num_warps=plan.tile.num_warps, num_stages=plan.tile.num_stages,
        enable_fp_fusion=True, maxnreg=_max_registers(x.dtype),
    )  # fmt: skip
    if slabs is not None and has_groups:
        _sum_slabs(out, slabs, None, None, weight.bias)
    elif slabs is not None:
        _sum_slabs(out, slabs, weight.scales, row_scales, weight.bias)
    return out


def _sum_slabs(
    out: torch.Tensor,
    slabs: torch.Tensor,
    column_scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    num_chunks, num_rows, out_features = slabs.shape
    sum_slabs_kernel[(num_rows, triton.cdiv(out_features, _SUM_COLUMNS))](
        out, slabs, column_scales, row_scales, bias, num_rows, out_features,
        NUM_CHUNKS=num_chunks, TILE_COLUMNS=_SUM_COLUMNS, num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip


def _buffers(
    x: torch.Tensor, plan: Plan, out_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate the output and, for a split product, the partial sums."""
    out = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    if not plan.is_split:
        return out, None
    shape = (plan.num_chunks, len(x), out_features)
    return out, torch.empty(shape, dtype=torch.float32, device=x.device)


def _max_registers(dtype: torch.dtype) -> int | None:
    """Maximum registers per thread, because ptxas spills those of float32 products to fit more programs."""
    return _MOST_REGISTERS if dtype == torch.float32 else None


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _require_fp8(op: str, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and not has_fp8():
        raise ValueError(f"{op}: this GPU is older than sm_90; allowed: sm_90 or later, or int8")
