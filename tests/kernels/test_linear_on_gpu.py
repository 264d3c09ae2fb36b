from __future__ import annotations

import pytest
import torch
from gpu_cases import DTYPES, GPU, captured

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.linear import LoadOptions, linear, prepare_linear, reference

pytestmark = pytest.mark.gpu

SIZES = [(1, 1000, 136), (7, 576, 1536), (300, 1000, 960)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_linear(
    sizes: tuple[int, int, int], is_plain: bool, batch_invariant: bool, dtype: torch.dtype
) -> None:
    num_tokens, num_in, num_out = sizes
    x = torch.randn(num_tokens, num_in + 8).to(dtype)[:, :num_in]
    matrix, bias, residual = (
        torch.randn(*shape).to(dtype) for shape in ((num_out, num_in), (num_out,), (num_tokens, num_out))
    )
    wide = reference.linear(x.float(), matrix.float(), None if is_plain else bias.float(), None)
    expected = wide.to(dtype) if is_plain else (wide.to(dtype) + residual)
    options = LoadOptions(batch_invariant=batch_invariant)
    weight = prepare_linear(matrix.to(GPU), None if is_plain else bias.to(GPU), options)
    actual = linear(x.to(GPU), weight, None if is_plain else residual.to(GPU))
    assert_close_to_reference(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_product_in_a_fixed_order_is_the_same_in_any_step(dtype: torch.dtype) -> None:
    x, matrix = (torch.randn(*shape, device=GPU).to(dtype) for shape in ((300, 1000), (1536, 1000)))
    weight = prepare_linear(matrix, options=LoadOptions(batch_invariant=True))
    whole = linear(x, weight)
    for part in (slice(0, 1), slice(63, 66), slice(17, 299)):
        assert torch.equal(linear(x[part], weight), whole[part])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_captured_product_of_a_linear_serves_other_activations(batch_invariant: bool) -> None:
    x, matrix = (torch.randn(*shape, device=GPU).bfloat16() for shape in ((4, 1000), (960, 1000)))
    weight = prepare_linear(matrix, options=LoadOptions(batch_invariant=batch_invariant))
    graph, out = captured(lambda: linear(x, weight))
    x.normal_()
    graph.replay()
    assert torch.equal(out, linear(x, weight))
