from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionCase, random_tree
from kernel_interpreter import Interpret
from kernel_tolerances import assert_close_to_reference

from naiad_kernels.paged_attention import AttentionPlan, paged_attention


def attend(interpret: Interpret, case: AttentionCase) -> torch.Tensor:
    plan = AttentionPlan(len(case.query), singles=[], chunks=[], device_step=case.step())
    return interpret(paged_attention, case.query, case.cache(), plan)


def with_trees(case: AttentionCase, seed: int = 0) -> AttentionCase:
    case.trees = [random_tree(length, seed) if 1 < length <= 16 else None for length in case.query_lens]
    return case


# In float32, and with more than four heads a KV head, sixteen tokens are no longer a short sequence.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 2, 16), (5, 1, 16), (8, 1, 16)])
def test_tokens_see_their_ancestors(
    interpret: Interpret, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    steps = [(1, 9), (2, 2), (7, 40), (16, 16), (16, 35), (30, 40)]
    for seed in (0, 1):
        case = with_trees(AttentionCase(steps, heads, dtype=dtype), seed)
        assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("length", [256, 260, 264, 530])
def test_a_tree_across_a_split_context(interpret: Interpret, length: int) -> None:
    case = with_trees(AttentionCase([(8, length)], heads=(2, 1, 16), block_size=64))
    assert_close_to_reference(attend(interpret, case), case.expected())


def test_a_quantized_cache(interpret: Interpret) -> None:
    steps = [(6, 40), (16, 270)]
    case = AttentionCase(steps, (2, 1, 16), 64, torch.float16, cache_dtype=torch.int8)
    assert_close_to_reference(attend(interpret, with_trees(case)), case.expected())


def test_a_chain_changes_no_bit(interpret: Interpret) -> None:
    case = AttentionCase([(1, 20), (3, 300), (16, 33), (40, 50)], heads=(2, 1, 16), block_size=64)
    expected = attend(interpret, case)
    case.trees = [None, *([(2 << row) - 1 for row in range(length)] for length in (3, 16)), None]
    assert torch.equal(attend(interpret, case), expected)


def test_a_nan_in_one_branch_does_not_reach_another(interpret: Interpret) -> None:
    """A key that a token must not see has no score; its value must be finite, as in a chain."""
    case = AttentionCase([(3, 20)], heads=(2, 1, 16))
    case.trees = [[0b1, 0b11, 0b101]]
    expected = case.expected()
    case.keys[case.tables[0][1], :, 18 - 16] = torch.nan
    actual = attend(interpret, case)
    assert actual[1].isnan().all()
    assert_close_to_reference(actual[[0, 2]], expected[[0, 2]])
