from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from kernel_interpreter import Interpret
from lora_cases import LoraCase

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.lora import kernel, lora_expand, lora_shrink, plan_lora
from naiad_kernels.lora.plan import TILE_TOKENS

IDS = {
    "one token": [1],
    "ragged": [2, 0, -1, 2, 2, 4, -1, 0, 2],
    "none": [-1, -1, -1],
    "more than a tile of one": [3] * 17 + [-1] + [0] * 16 + [3] * 16,
}


def run(interpret: Interpret, case: LoraCase) -> torch.Tensor:
    """The kernels' output, which is part of a wider tensor whose other columns stay NaN."""
    shrunk = interpret(kernel.lora_shrink, case.x, case.down, case.plan)
    out_dim = case.out.shape[1]
    wide = torch.cat((case.out, torch.full_like(case.out[:, :5], torch.nan)), dim=1)
    interpret(kernel.lora_expand, wide[:, :out_dim], shrunk, case.up, case.slice_sizes, case.plan)
    assert wide[:, out_dim:].isnan().all()
    return wide[:, :out_dim]


@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
def test_plan_covers_every_token_with_an_adapter_once(ids: list[int]) -> None:
    plan = plan_lora(torch.tensor(ids), 5)
    covered: list[int] = []
    for adapter, begin, end in zip(plan.tile_adapters, plan.tile_begins, plan.tile_ends, strict=True):
        if adapter >= 0:
            tokens = plan.token_ids[begin:end].tolist()
            assert 0 < len(tokens) <= TILE_TOKENS
            assert {ids[token] for token in tokens} == {int(adapter)}
            covered += tokens
    assert sorted(covered) == [token for token, adapter in enumerate(ids) if adapter >= 0]


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 100])
def test_sizes_of_a_plan_do_not_depend_on_the_ids(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    plans = [plan_lora(torch.randint(-1, high, (num_tokens,)), 7) for high in (0, 1, 7, 7)]
    for field in fields(plans[0]):
        assert len({getattr(plan, field.name).shape for plan in plans}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
def test_outputs_equal_the_reference(interpret: Interpret, ids: list[int], dtype: torch.dtype) -> None:
    case = LoraCase(ids, in_dim=200, slice_sizes=(70, 33, 33), ranks=[8, 16, 8, 12, 16], dtype=dtype)
    actual, expected = run(interpret, case), case.expected()
    is_adapted = torch.tensor(ids) >= 0
    assert_close_to_reference(actual[is_adapted], expected[is_adapted])
    assert torch.equal(actual[~is_adapted], case.out[~is_adapted])


@pytest.mark.parametrize("max_rank", [8, 64, 128])
def test_ranks(interpret: Interpret, max_rank: int) -> None:
    ranks = [max_rank, 8, max_rank // 2]
    case = LoraCase([0, 1, 2, -1, 1], 130, (150,), ranks, torch.float16)
    assert_close_to_reference(run(interpret, case)[:3], case.expected()[:3])


def test_a_wide_input_is_summed_in_parts(interpret: Interpret) -> None:
    case = LoraCase([0, 1, 0], 1100, (20, 20), [8, 8], torch.float16)
    shrunk = interpret(kernel.lora_shrink, case.x, case.down, case.plan)
    assert shrunk.shape == (3, 2, 3, 8)
    torch.testing.assert_close(shrunk.sum(0), lora_shrink(case.x, case.down, case.plan)[0])
    assert_close_to_reference(run(interpret, case), case.expected())


def test_many_tokens_take_runs_of_tiles(interpret: Interpret) -> None:
    ids = [0] * 250 + [-1] + [1] * 5
    case = LoraCase(ids, 20, (40, 540), [8, 8], torch.float32)
    assert len(case.plan.tile_adapters) > 16
    actual, expected = run(interpret, case), case.expected()
    assert_close_to_reference(
        torch.cat((actual[:250], actual[251:])), torch.cat((expected[:250], expected[251:]))
    )


def test_batch_mates_do_not_show(interpret: Interpret) -> None:
    case = LoraCase([1, 0, 1, -1, 0, 0], 150, (48,), [16, 8], torch.float16)
    together = run(interpret, case)
    alone = case.of_token(4)
    assert torch.equal(together[4:5], run(interpret, alone))
    assert torch.equal(together, run(interpret, case))


def test_no_tokens(interpret: Interpret) -> None:
    assert run(interpret, LoraCase([], 16, (16,), [8], torch.float32)).shape == (0, 16)


def test_the_reference_is_the_product_of_each_tokens_own_matrices() -> None:
    ids = IDS["ragged"]
    case = LoraCase(ids, 40, (12, 8), [8, 16, 8, 8, 8], torch.float32)
    out = case.out.clone()
    lora_expand(out, lora_shrink(case.x, case.down, case.plan), case.up, case.slice_sizes, case.plan)
    for token, adapter in enumerate(ids):
        if adapter >= 0:
            first, second = case.up[adapter].split(case.slice_sizes)
            product = torch.cat(
                (
                    first @ case.down[adapter, 0] @ case.x[token],
                    second @ case.down[adapter, 1] @ case.x[token],
                )
            )
            torch.testing.assert_close(out[token], case.out[token] + product)
    assert torch.equal(out[2], case.out[2])
