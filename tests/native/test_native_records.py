"""Every record of the native kernels against the plain reference of the op that it is recorded from."""

from __future__ import annotations

import pytest
import torch

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_reference
from helpers.native_tapes import (
    native_cache,
    positions_of,
    rounded_rows,
    run_records,
    tables_of,
    torch_keys,
    torch_values,
)
from naiad_kernels.embedding import embedding
from naiad_kernels.gelu_and_mul import gelu_and_mul
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.linear import linear
from naiad_kernels.linear import reference as linear_reference
from naiad_kernels.native.library import Product, Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TracedGroup
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.rotary_store_kv import reference as rotary_reference
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.soft_cap import soft_cap
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import reference as store_kv_reference

NUM_TOKENS = [1, 3, 7, 13]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weight_and_matrix(
    product: Product, shape: tuple[int, int], has_bias: bool
) -> tuple[NativeWeight, torch.Tensor, torch.Tensor | None]:
    """A weight that is multiplied like that, and the same numbers in float32."""
    matrix, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    if product != Product.FLOAT_BY_FLOAT:
        stored = torch.float16 if product == Product.FLOAT_BY_F16 else torch.bfloat16
        matrix = matrix.to(stored)
        bias = None if bias is None else bias.to(stored)
    if product in (Product.FLOAT_BY_BF16, Product.FLOAT_BY_F16):
        matrix, bias = matrix.float(), None if bias is None else bias.float()
    weight = NativeWeight.of(matrix, bias)
    assert weight.product == product
    return weight, matrix.float(), None if bias is None else bias.float()


def test_every_float16_is_widened_exactly(team: Team) -> None:
    """As a weight, and as a row of an embedding: zeros and smallest numbers of both signs too."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()].reshape(-1, 1)
    weight = NativeWeight.of(finite.float(), None)
    assert weight.product == Product.FLOAT_BY_F16
    product = run_records(team, lambda _, x: linear(x, weight), torch.ones(1, 1))
    assert torch.equal(product[0], finite[:, 0].float())
    table, ids = every.reshape(-1, 32), torch.arange(len(every) // 32)
    rows = run_records(team, lambda recorder: embedding(recorder.token_ids(), table), token_ids=ids)
    assert torch.equal(rows.nan_to_num(7), table.float().nan_to_num(7))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_inputs_keep_all_their_bits(team: Team, num_tokens: int) -> None:
    """Weights in bfloat16 do not round the floats that they are multiplied by, however large or small."""
    weight = NativeWeight.of(torch.eye(70), None)
    assert weight.product == Product.FLOAT_BY_BF16
    x = torch.randn(num_tokens, 70) * 2.0 ** torch.randint(-95, 120, (num_tokens, 70))
    assert torch.equal(run_records(team, lambda _, x: linear(x, weight), x), x)


def test_rows_that_are_not_finite_show(team: Team) -> None:
    weight = NativeWeight.of(torch.eye(70), None)
    x = torch.randn(20, 70)
    for row, value in ((3, torch.inf), (11, -torch.inf), (19, torch.nan)):
        x[row, row] = value
    product = run_records(team, lambda _, x: linear(x, weight), x)
    is_finite = torch.ones(20, dtype=torch.bool)
    is_finite[[3, 11, 19]] = False
    assert torch.equal(product.isfinite().all(1), is_finite)
    assert torch.equal(product[is_finite], x[is_finite])


def test_weights_are_kept_in_the_16_bits_that_hold_them() -> None:
    both = torch.tensor([[1.0, -0.5]])
    for values, product in (
        (both, Product.FLOAT_BY_BF16),
        (both + 2**-10, Product.FLOAT_BY_F16),
        (both * 1e30, Product.FLOAT_BY_FLOAT),
        (both + 2**-20, Product.FLOAT_BY_FLOAT),
        (both * 70000, Product.FLOAT_BY_FLOAT),
    ):
        assert NativeWeight.of(values, None).product == product


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("shape", [(37, 51), (200, 130), (1, 1)], ids=str)
@pytest.mark.parametrize("extras", ["bare", "bias", "bias_and_residual"])
@pytest.mark.parametrize(
    "product",
    [Product.FLOAT_BY_FLOAT, Product.FLOAT_BY_BF16, Product.FLOAT_BY_F16, Product.BF16_BY_BF16],
    ids=lambda each: each.name,
)
def test_linear(team: Team, product: Product, shape: tuple[int, int], extras: str, num_tokens: int) -> None:
    weight, matrix, bias = weight_and_matrix(product, shape, has_bias=extras != "bare")
    inputs = [torch.randn(num_tokens, shape[1])]
    if extras == "bias_and_residual":
        inputs.append(torch.randn(num_tokens, shape[0]))
    actual = run_records(team, lambda _, x, *residual: linear(x, weight, *residual), *inputs)
    x = inputs[0].bfloat16().float() if product == Product.BF16_BY_BF16 else inputs[0]
    residual = inputs[1] if len(inputs) == 2 else None
    assert_close_to_reference(actual, linear_reference.linear(x, matrix, bias, residual))


def rounded_weights(matrix: torch.Tensor) -> torch.Tensor:
    """Weights in eight bits: the largest of each output is ±127 steps."""
    step = matrix.float().abs().amax(1, keepdim=True) / 127
    rounded = (matrix.float() / step).round() * step
    assert ((rounded - matrix.float()).abs() <= 0.501 * step).all()
    return rounded


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("shape", [(37, 51), (200, 130), (64, 640), (1, 1), (1030, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", ["bare", "bias", "bias_and_residual"])
def test_quantised_linear(
    team: Team, extras: str, dtype: torch.dtype, shape: tuple[int, int], num_tokens: int
) -> None:
    matrix, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight = NativeWeight.quantised(matrix, None if extras == "bare" else bias)
    rounded = rounded_weights(matrix)
    inputs = [torch.randn(num_tokens, shape[1])]
    if extras == "bias_and_residual":
        inputs.append(torch.randn(num_tokens, shape[0]))
    actual = run_records(team, lambda _, x, *residual: linear(x, weight, *residual), *inputs)
    residual = inputs[1] if len(inputs) == 2 else None
    whole_bias = None if extras == "bare" else bias.float()
    expected = linear_reference.linear(rounded_rows(inputs[0]), rounded, whole_bias, residual)
    assert_close_to_reference(actual, expected)


def test_quantised_linear_of_extremes(team: Team) -> None:
    """The largest weights and inputs of either sign, rows of zeros, outputs without a weight, tiny inputs."""
    matrix = torch.ones(48, 128)
    matrix[1], matrix[2], matrix[3] = -1, 0, torch.tensor([1.0, -1.0]).repeat(64)
    x = torch.stack((torch.ones(128), -torch.ones(128), torch.zeros(128), torch.full((128,), 1e-38)))
    actual = run_records(team, lambda _, x: linear(x, NativeWeight.quantised(matrix, None)), x)
    expected = x @ matrix.T
    assert_close_to_reference(actual[:3], expected[:3])
    assert (actual[2:] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 77, 129])
def test_an_input_that_is_not_finite_shows_in_its_row_alone(team: Team, place: int, bad: float) -> None:
    x = torch.randn(5, 130)
    x[3, place] = bad
    weight = NativeWeight.quantised(torch.randn(40, 130), None)
    actual = run_records(team, lambda _, x: linear(x, weight), x)
    assert actual[3].isnan().all()
    assert actual[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("width", [32, 208, 19])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gate", ["silu", "tanh", "none"])
def test_gated_linear(
    team: Team, gate: str, has_bias: bool, width: int, is_quantised: bool, num_tokens: int
) -> None:
    """With a width that is a multiple of 16 the product gates its own sums."""
    weight, matrix, bias = weight_and_matrix(Product.FLOAT_BY_BF16, (2 * width, 51), has_bias)
    x = torch.randn(num_tokens, 51)
    if is_quantised:
        weight = NativeWeight.quantised(matrix, bias)
        product = linear_reference.linear(rounded_rows(x), rounded_weights(matrix), bias, None)
    else:
        product = linear_reference.linear(x, matrix, bias, None)
    if gate == "silu":
        actual = run_records(team, lambda _, x: silu_and_mul(linear(x, weight)), x)
        expected = silu_reference.silu_and_mul(product)
    else:
        actual = run_records(team, lambda _, x: gelu_and_mul(linear(x, weight), gate), x)
        expected = gelu_reference.gelu_and_mul(product, gate)
    assert_close_to_reference(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 3.5])
def test_embedding(team: Team, dtype: torch.dtype, factor: float) -> None:
    table, ids = torch.randn(11, 37).to(dtype), torch.tensor([10, 0, 3, 3, 7])
    actual = run_records(team, lambda recorder: embedding(recorder.token_ids(), table, factor), token_ids=ids)
    assert_close_to_reference(actual, table[ids].float() * factor)


@pytest.mark.parametrize("width", [1, 37, 64, 130])
def test_norms(team: Team, width: int) -> None:
    x, residual, weight = torch.randn(7, width) * 3, torch.randn(7, width), torch.randn(width)
    normed = run_records(team, lambda _, x: rms_norm(x, weight, 1e-5), x)
    assert_close_to_reference(normed, rms_norm_reference.rms_norm(x, weight, 1e-5))
    expected, total = rms_norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    for index, wanted in enumerate((expected, total)):
        actual = run_records(
            team, lambda _, x, y, index=index: add_rms_norm(x, y, weight, 1e-5)[index], x, residual
        )
        assert_close_to_reference(actual, wanted)


def test_soft_cap(team: Team) -> None:
    x = torch.cat((torch.linspace(-90, 90, 101), torch.linspace(-0.01, 0.01, 8)))[None] * 3
    actual = run_records(team, lambda _, x: soft_cap(x, 30.0), x)
    assert_close_to_reference(actual, soft_cap(x.clone(), 30.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [6, 32, 80])
def test_rotary_and_store(team: Team, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, query_lens, seq_lens = 6, 2, [1, 5, 2], [70, 5, 33]
    tables = [[4, 0], [2], [1]]
    heads = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)
    frequencies = torch.rand(head_dim // 2)
    norm = HeadNorm(torch.rand(num_heads + num_kv_heads, head_dim) + 0.5, 1e-6) if has_norm else None
    shape = (5, num_kv_heads, 64, head_dim)
    cache = LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    positions = positions_of(query_lens, seq_lens)
    query = run_records(
        team,
        lambda recorder, heads: rotary_store_kv(
            heads,
            rotary_angles(recorder.positions(), frequencies, torch.float32),
            norm,
            cache,
            TracedGroup(0, 0),
        ),
        heads.flatten(1),
        positions=positions,
        tables=tables_of(query_lens, tables),
    )
    expected_cache = LayerCache(torch.zeros(shape), torch.zeros(shape))
    rows = [row for row, length in enumerate(query_lens) for _ in range(length)]
    blocks = torch.tensor(
        [tables[row][place // 64] for row, place in zip(rows, positions.tolist(), strict=True)]
    )
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    expected = rotary_reference.rotary_store_kv(
        heads,
        rotary_angles(positions, frequencies, torch.float32),
        (weight, eps),
        expected_cache,
        Slots(blocks, positions % 64),
    )
    assert_close_to_reference(query, expected.flatten(1))
    assert_close_to_reference(torch_keys(cache.key), expected_cache.key.to(dtype))
    assert_close_to_reference(torch_values(cache.value), expected_cache.value.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [6, 32, 80])
def test_codes_of_the_kv_cache(team: Team, head_dim: int, dtype: torch.dtype) -> None:
    """Those of `store_kv`, also for vectors of zeros, of extremes, and with elements that are not finite."""
    num_tokens, num_heads, num_kv_heads = 6, 4, 2
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    heads[1] = 0
    heads[2] *= 1e-35
    heads[3] *= 1e30
    heads[4, :, 1] = torch.nan
    heads[5, :, 0] = torch.inf
    shape = (3, num_kv_heads, 32, head_dim)
    cache, expected = (
        LayerCache(
            torch.zeros(shape, dtype=torch.int8),
            torch.zeros(shape, dtype=torch.int8),
            torch.zeros(shape[:-1]),
            torch.zeros(shape[:-1]),
        )
        for _ in range(2)
    )
    # No rotation, which would round.
    positions, frequencies = torch.arange(num_tokens), torch.zeros(head_dim // 2)
    run_records(
        team,
        lambda recorder, heads: rotary_store_kv(
            heads,
            rotary_angles(recorder.positions(), frequencies, torch.float32),
            None,
            cache,
            TracedGroup(0, 0),
        ),
        heads.flatten(1),
        positions=positions,
        tables=tables_of([num_tokens], [[2]]),
        dtype=dtype,
    )
    key, value = heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    store_kv_reference.store_kv(key, value, expected, Slots(torch.full((num_tokens,), 2), positions))
    torch.testing.assert_close(cache.key_scale, expected.key_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.value_scale, expected.value_scale, rtol=0, atol=0, equal_nan=True)
    finite = torch.tensor([0, 1, 2, 3])
    assert torch.equal(torch_keys(cache.key, dtype)[2][:, finite], expected.key[2][:, finite])
    assert torch.equal(torch_values(cache.value, dtype)[2][:, finite], expected.value[2][:, finite])


STEPS = {
    "one": [(1, 1)],
    "decode": [(1, 70), (1, 16), (1, 17), (1, 1), (1, 64)],
    "chunks": [(5, 5), (13, 40), (1, 33), (64, 64)],
    "long": [(1, 1300)],
    "long_chunk": [(30, 1030), (1, 513), (1, 512)],
}


@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(6, 2, 16), (4, 4, 10), (14, 1, 64), (3, 1, 144)], ids=str)
@pytest.mark.parametrize("kind", ["full", "window", "cap"])
@pytest.mark.parametrize("steps", list(STEPS))
def test_attention(
    team: Team,
    steps: str,
    kind: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    codes: torch.dtype | None,
) -> None:
    """What must not be read is NaN."""
    case = AttentionCase(
        STEPS[steps],
        heads=heads,
        block_size=32,
        dtype=dtype,
        cache_dtype=codes,
        window=21 if kind == "window" else 0,
        soft_cap=2.0 if kind == "cap" else 0.0,
        scale=0.7 if kind == "cap" else None,
    )
    if case.layout.window:
        case.forget_what_no_token_sees()
    actual = attention(team, case)
    expected = case.expected()
    if dtype == torch.float32:
        assert_close_to_reference(actual, expected)
    else:
        assert_close_to_reference(actual.bfloat16(), expected)


def attention(team: Team, case: AttentionCase) -> torch.Tensor:
    dtype = case.layout.dtype
    cache, scale, cap = native_cache(case.cache(), dtype), case.scale, case.soft_cap
    return run_records(
        team,
        lambda _, query: paged_attention(query, cache, TracedGroup(0, case.layout.window), scale, cap),
        case.query.float().flatten(1),
        dtype=dtype,
        positions=positions_of(case.query_lens, case.seq_lens),
        tables=tables_of(case.query_lens, case.tables),
    )
