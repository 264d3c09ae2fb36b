"""What is not there is refused before anything is computed; what cannot be recorded, at the start."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from helpers.native_tapes import run_records, tables_of
from naiad_kernels.embedding import embedding
from naiad_kernels.linear import linear, prepare_linear
from naiad_kernels.native.library import Kind, Record, Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TapeRecorder, TracedGroup
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.recording import NotRecordableError
from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache


@pytest.mark.parametrize("token_id", [-1, 11, 1 << 40])
def test_token_ids_outside_the_table(team: Team, token_id: int) -> None:
    ids = torch.tensor([3, token_id])
    with pytest.raises(ValueError, match="a token id is outside the embedding"):
        run_records(team, lambda recorder: embedding(recorder.token_ids(), torch.randn(11, 8)), token_ids=ids)


@pytest.mark.parametrize(
    ("positions", "table", "window", "problem"),
    [
        ([15, 16, 17], [0, 3], 0, "a block id is outside the KV cache"),
        ([15, 16, 17], [-1, 2], 0, "a block id is outside the KV cache"),
        ([15, 16, 17], [2], 0, "a block table is too short for its sequence"),
        ([15, 17, 18], [0, 1], 0, "a sequence's positions do not follow each other"),
        ([-1, 0, 1], [0, 1], 0, "a sequence's positions do not follow each other"),
        ([33, 34, 35], [-1, -1, 2], 3, "a block id is outside the KV cache"),
    ],
)
def test_steps_outside_the_cache(
    team: Team, positions: list[int], table: list[int], window: int, problem: str
) -> None:
    cache = LayerCache(torch.zeros(3, 2, 16, 8), torch.zeros(3, 2, 16, 8))
    with pytest.raises(ValueError, match=problem):
        run_records(
            team,
            lambda _, query: paged_attention(query, cache, TracedGroup(0, window)),
            torch.randn(3, 32),
            positions=torch.tensor(positions),
            tables=tables_of([3], [table]),
        )


def test_a_short_table_beside_a_long_one(team: Team) -> None:
    """What pads a table is no block."""
    cache = LayerCache(torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8))
    with pytest.raises(ValueError, match="a block id is outside the KV cache"):
        run_records(
            team,
            lambda _, query: paged_attention(query, cache, TracedGroup(0, 0)),
            torch.randn(2, 32),
            positions=torch.tensor([20, 20]),
            tables=tables_of([1, 1], [[1], [2, 3]]),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_gone", [1, 2, 3])
def test_blocks_before_the_window_may_be_gone(team: Team, num_gone: int, dtype: torch.dtype) -> None:
    """Whether or not they are computed together with those that are seen."""
    keys, values = torch.zeros(5, 2, 16, 8, dtype=dtype), torch.ones(5, 2, 16, 8, dtype=dtype)
    values[:num_gone] = torch.nan
    result = run_records(
        team,
        lambda _, query: paged_attention(query, LayerCache(keys, values), TracedGroup(0, 2)),
        torch.randn(3, 32),
        positions=16 * num_gone + torch.tensor([1, 2, 3]),
        tables=tables_of([3], [[-1] * num_gone + [num_gone]]),
    )
    assert torch.equal(result, torch.ones(3, 32))


def test_what_has_no_record_is_named() -> None:
    recorder = TapeRecorder()
    rows = recorder.rows(8)
    cache = LayerCache(torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8))
    for attempt, name in (
        (lambda: torch.sigmoid(rows), "sigmoid"),
        (lambda: F.softmax(rows, dim=-1), "softmax"),
        (lambda: rows.mul_(2), "Tensor.mul_"),
        (lambda: rows.view(-1, 8), "Tensor.view"),
        (lambda: linear(rows, prepare_linear(torch.randn(4, 8))), "linear by"),
        (lambda: recorder.record("gumbel_argmax", (rows,), {}), "gumbel_argmax"),
        (
            lambda: paged_attention(rows, cache, TracedGroup(0, 0), -1.0),
            "paged_attention with a scale of -1.0",
        ),
    ):
        with pytest.raises(NotRecordableError, match=f"{name}.* has no record"):
            attempt()


@pytest.mark.parametrize("window", [2**31, 2**32 + 16, -1])
def test_a_window_that_a_record_cannot_hold_is_not_recorded(window: int) -> None:
    """It would be another one in the kernels: -2**31, and 16."""
    recorder = cast(Any, TapeRecorder())
    cache = LayerCache(torch.zeros(3, 2, 16, 8), torch.zeros(3, 2, 16, 8))
    with pytest.raises(AssertionError, match=str(window)):
        paged_attention(recorder.rows(32), cache, cast(Any, TracedGroup(0, window)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_heads": 2**32}, "num_heads = 4294967296 does not fit"),
        ({"group": -(2**31) - 1}, "group = -2147483649 does not fit"),
        ({"num_rows": 2**63}, "num_rows = 9223372036854775808 does not fit"),
        ({"soft_cap": 1e39}, r"soft_cap = 1e\+39 is beyond float32"),
    ],
)
def test_a_record_has_the_numbers_that_it_was_made_of(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        Record(kind=Kind.ATTENTION, **fields)
    least = Record(kind=Kind.ATTENTION, num_heads=2**31 - 1, group=-(2**31), factor=0.1)
    assert (least.num_heads, least.group) == (2**31 - 1, -(2**31))


def test_the_sums_of_a_gated_product_cannot_be_used_twice() -> None:
    weight = NativeWeight.of(torch.randn(64, 8), None)
    recorder = TapeRecorder()
    sums = linear(cast(Any, recorder.rows(8)), weight)
    silu_and_mul(sums)
    with pytest.raises(NotRecordableError, match="gated product"):
        recorder.finish(cast(Any, sums))
    silu_and_mul(sums)
    with pytest.raises(NotRecordableError, match="gated product"):
        recorder.finish(cast(Any, silu_and_mul(sums)))


def test_public_ops_take_named_arguments() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    assert torch.equal(rms_norm(x=x, weight=weight, eps=1e-5), rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("form", [NativeWeight.of, NativeWeight.quantised])
def test_a_weight_with_more_panels_than_outputs(form: Any) -> None:
    weight = form(torch.randn(32, 64), None)
    object.__setattr__(weight, "panels", torch.cat([weight.panels] * 2))
    recorder = TapeRecorder()
    with pytest.raises(ValueError, match="panels are"):
        linear(recorder.rows(64), weight)
