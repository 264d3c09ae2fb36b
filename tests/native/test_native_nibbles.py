"""Linear layers over weights of four bits, and what weights become in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers.kernel_tolerances import assert_close_to_reference
from helpers.native_nibbles import with_minimums, with_zero_points
from helpers.native_tapes import rounded_rows, run_records
from naiad_kernels.linear import linear
from naiad_kernels.linear import reference as linear_reference
from naiad_kernels.native.library import Product, Team
from naiad_kernels.native.nibbles import NibbleWeight
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul

FORMS = {"zero_points": with_zero_points, "minimums": with_minimums}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
Form = Callable[[torch.Tensor], NibbleWeight]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain_matrix(weight: NibbleWeight) -> torch.Tensor:
    """The weight number by number, as it is documented."""
    matrix = torch.empty(weight.numbers.shape, dtype=torch.float64)
    for i in range(matrix.shape[1]):
        number, scale, offset = weight.numbers[:, i].double(), *_group(weight, i // 32)
        matrix[:, i] = number * scale + offset if weight.has_minimums else (number - 8 - offset / 8) * scale
    return matrix.float()


def _group(weight: NibbleWeight, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.scales[:, group].double(), weight.offsets[:, group].double()


@each_form
@pytest.mark.parametrize("shape", [(37, 51), (200, 130), (48, 576), (40, 32), (1, 1), (1030, 20)], ids=str)
@pytest.mark.parametrize("extras", ["bare", "bias", "bias_and_residual"])
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 13])
def test_linear(team: Team, num_tokens: int, extras: str, shape: tuple[int, int], form: Form) -> None:
    weight = form(torch.randn(shape))
    bias = None if extras == "bare" else torch.randn(shape[0])
    native = NativeWeight.of_nibbles(weight, bias)
    inputs = [torch.randn(num_tokens, shape[1])]
    if extras == "bias_and_residual":
        inputs.append(torch.randn(num_tokens, shape[0]))
    actual = run_records(team, lambda _, x, *residual: linear(x, native, *residual), *inputs)
    residual = inputs[1] if len(inputs) == 2 else None
    expected = linear_reference.linear(rounded_rows(inputs[0]), plain_matrix(weight), bias, residual)
    assert_close_to_reference(actual, expected)


@each_form
@pytest.mark.parametrize("width", [32, 208, 19])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_gated_linear(team: Team, num_tokens: int, width: int, form: Form) -> None:
    weight, bias, x = form(torch.randn(2 * width, 100)), torch.randn(2 * width), torch.randn(num_tokens, 100)
    native = NativeWeight.of_nibbles(weight, bias)
    actual = run_records(team, lambda _, x: silu_and_mul(linear(x, native)), x)
    product = linear_reference.linear(rounded_rows(x), plain_matrix(weight), bias, None)
    assert_close_to_reference(actual, silu_reference.silu_and_mul(product))


@pytest.mark.parametrize("zero", [0, 7, 8, 15, 16])
@pytest.mark.parametrize("number", [0, 15])
def test_the_largest_sums(team: Team, number: int, zero: int) -> None:
    """Every product is as large as it can be: nothing saturates and nothing is rounded."""
    numbers, ones = torch.full((16, 128), number), torch.ones(16, 4)
    weight = NibbleWeight.of_zero_points(numbers, ones, ones * zero)
    assert weight is not None
    native, x = NativeWeight.of_nibbles(weight, None), torch.stack((torch.ones(128), -torch.ones(128))) * 127
    actual = run_records(team, lambda _, x: linear(x, native), x)
    assert torch.equal(actual, x @ (numbers.float() - zero).T)


@each_form
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 77, 129])
def test_an_input_that_is_not_finite_shows_in_its_row_alone(
    team: Team, place: int, bad: float, form: Form
) -> None:
    x = torch.randn(5, 130)
    x[3, place] = bad
    native = NativeWeight.of_nibbles(form(torch.randn(40, 130)), None)
    actual = run_records(team, lambda _, x: linear(x, native), x)
    assert actual[3].isnan().all()
    assert actual[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 51), (1300, 64), (3, 576)], ids=str)
def test_weights_are_rounded_to_the_nearest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Within half a step, and within a sixteenth more where a zero point is no whole eighth."""
    matrix = torch.randn(shape).to(dtype)
    weight = NibbleWeight.rounded(matrix)
    assert weight is not None
    assert torch.equal(weight.matrix(), plain_matrix(weight))
    steps = weight.scales.float().repeat_interleave(32, 1)[:, : shape[1]]
    assert ((weight.matrix() - matrix.float()).abs() <= 0.58 * steps).all()
    # A step is not larger than it has to be.
    groups = matrix.float()[:, :32]
    span = groups.amax(1).clamp_min(0) - groups.amin(1).clamp_max(0)
    assert torch.allclose(steps[:, 0] * 15, span, rtol=1e-3)


def test_groups_of_one_sign_and_of_zeros_are_rounded_too() -> None:
    matrix = torch.rand(4, 64) + 1
    matrix[1] *= -1
    matrix[2] = 0
    matrix[3] = 1.5
    weight = NibbleWeight.rounded(matrix)
    assert weight is not None
    assert ((weight.matrix() - matrix).abs() <= 0.08).all()
    assert (weight.matrix()[2] == 0).all()


def test_weights_beyond_float16_are_not_rounded_to_four_bits() -> None:
    assert NibbleWeight.rounded(torch.randn(4, 64) * 1e6) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_made_of_numbers_and_minimums_is_found_again(dtype: torch.dtype) -> None:
    matrix = torch.randn(40, 96)
    groups = matrix.unflatten(1, (-1, 32))
    least, span = groups.amin(2).half().float(), groups.amax(2) - groups.amin(2)
    scales = (span / 15).half().float()
    numbers = ((groups - least[:, :, None]) / scales[:, :, None]).round().clamp(0, 15)
    made = (numbers * scales[:, :, None] + least[:, :, None]).flatten(1)
    found = NibbleWeight.aligned(made.to(dtype))
    assert found is not None
    assert torch.equal(found.numbers, numbers.flatten(1).to(torch.uint8))
    assert torch.allclose(found.matrix(), made, rtol=2**-7, atol=2**-7)
    assert NibbleWeight.aligned(matrix) is None


def test_numbers_of_larger_groups_are_kept_with_a_scale_for_each_32() -> None:
    numbers = torch.randint(0, 16, (16, 256))
    scales, zeros = torch.rand(16, 2).half().float(), torch.randint(0, 17, (16, 2)).float()
    weight = NibbleWeight.of_zero_points(numbers, scales, zeros)
    assert weight is not None
    expected = (numbers - zeros.repeat_interleave(128, 1)) * scales.repeat_interleave(128, 1)
    assert torch.equal(weight.matrix(), expected)


def test_one_group_may_have_any_number_of_inputs() -> None:
    numbers, ones = torch.randint(0, 16, (16, 50)), torch.ones(16, 1)
    weight = NibbleWeight.of_zero_points(numbers, ones, ones * 8)
    assert weight is not None
    assert torch.equal(weight.matrix(), numbers - 8.0)


@pytest.mark.parametrize(
    ("num_inputs", "scale", "zero"), [(64, 1 + 2**-12, 8.0), (64, 1.0, 8.03), (64, 1.0, 40.0), (96, 1.0, 8.0)]
)
def test_what_cannot_be_kept_exactly_is_not_kept(num_inputs: int, scale: float, zero: float) -> None:
    groups = torch.ones(16, 2)
    numbers = torch.zeros(16, num_inputs)
    assert NibbleWeight.of_zero_points(numbers, groups * scale, groups * zero) is None


def test_four_bits_take_less_than_five() -> None:
    for form, bits in ((with_zero_points, 4.75), (with_minimums, 5.0)):
        native = NativeWeight.of_nibbles(form(torch.randn(256, 576)), None)
        assert 8 * native.panels.nbytes == bits * 256 * 576
    assert native.product == Product.INT4_AND_MINIMUM_BY_INT8
