"""What is not there is refused before anything is computed; what cannot be recorded, at the start."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from helpers.native_tapes import run_records, tables_of
from naiad_kernels.best_tokens import BestTokens, best_tokens
from naiad_kernels.draw_tokens import Draws, draw_tokens
from naiad_kernels.embedding import embedding
from naiad_kernels.kept_threshold import RowFilters
from naiad_kernels.linear import linear, prepare_linear
from naiad_kernels.native.library import Kind, Record, Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TapeRecorder, TracedGroup
from naiad_kernels.native.tape import Tape
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.recording import NotRecordableError
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache

NUM_TOKENS, NUM_TOKEN_IDS, WIDTH = 3, 11, 32


def whole_tape(team: Team) -> Tape:
    """A tape that reads all that a step can have: tables of two groups, rows, and room for picks."""
    recorder = cast(Any, TapeRecorder())
    cache = LayerCache(torch.zeros(3, 2, 16, 8), torch.zeros(3, 2, 16, 8))
    rows = embedding(recorder.token_ids(), torch.randn(NUM_TOKEN_IDS, WIDTH))
    rows, _ = add_rms_norm(rows, recorder.rows(WIDTH), torch.ones(WIDTH), 1e-5)
    for group in range(2):
        rows = paged_attention(rows, cache, cast(Any, TracedGroup(group, 0)))
    best_tokens(rows)
    draw_tokens(rows, cast(Any, None), cast(Any, None))
    return Tape(recorder.finish(rows), team)


def whole_step() -> dict[str, Any]:
    """A step of two sequences for `whole_tape`."""
    filters = RowFilters(whole(1.0), torch.zeros(NUM_TOKENS, dtype=torch.int64), whole(1.0), whole(-20.0))
    keys = torch.arange(NUM_TOKENS)
    return {
        "num_tokens": NUM_TOKENS,
        "token_ids": torch.tensor([1, 2, 3]),
        "positions": torch.tensor([16, 0, 1]),
        "tables": [*tables_of([1, 2], [[0, 1], [2]]), *tables_of([1, 2], [[0, 2], [1]])],
        "inputs": [torch.ones(NUM_TOKENS, WIDTH)],
        "best": BestTokens.empty(NUM_TOKENS),
        "allowed": torch.full((NUM_TOKENS, 1), -1, dtype=torch.int32),
        "draws": Draws(filters, keys, torch.empty_like(keys)),
    }


def whole(value: float) -> torch.Tensor:
    return torch.full((NUM_TOKENS,), value, dtype=torch.float64)


def with_table(group: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Change the tables of one group."""

    def change(step: dict[str, Any]) -> None:
        step["tables"][group] = replace(step["tables"][group], **changes)

    return change


def with_(field: str, make: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """Change a field, or an attribute of one, to what is made of its tensor."""

    def changed(owner: Any, names: list[str]) -> Any:
        if not names:
            return make(owner)
        name, *rest = names
        return replace(owner, **{name: changed(getattr(owner, name), rest)})

    def change(step: dict[str, Any]) -> None:
        first, *rest = field.split(".")
        step[first] = changed(step[first], rest)

    return change


def without(*fields: str) -> Callable[[dict[str, Any]], None]:
    def change(step: dict[str, Any]) -> None:
        step.update(dict.fromkeys(fields))

    return change


def with_rows(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(step: dict[str, Any]) -> None:
        step["inputs"] = [make(step["inputs"][0])]

    return change


@pytest.fixture
def untouched() -> Team:
    """A team whose native code is not to be called."""

    def run(*_: object) -> None:
        raise SystemError("native code is called")

    return cast(Team, SimpleNamespace(library=SimpleNamespace(run=run)))


def test_the_step_that_the_next_test_spoils_is_computed(team: Team) -> None:
    step = whole_step()
    tape = whole_tape(team)
    assert tape.run(**step).shape == (NUM_TOKENS, WIDTH)
    assert set(step["draws"].token_ids.tolist()) <= set(range(WIDTH))
    # Rows need not be contiguous.
    step["inputs"] = [torch.ones(WIDTH, NUM_TOKENS).T]
    assert tape.run(**step).shape == (NUM_TOKENS, WIDTH)


PER_TOKEN = [
    ("token_ids", "int64"),
    ("positions", "int64"),
    ("best.token_ids", "int64"),
    ("best.logits", "float32"),
    ("draws.filters.temperature", "float64"),
    ("draws.filters.top_k", "int64"),
    ("draws.filters.top_p", "float64"),
    ("draws.filters.log_min_p", "float64"),
    ("draws.keys", "int64"),
    ("draws.token_ids", "int64"),
]


@pytest.mark.parametrize(("field", "dtype"), PER_TOKEN)
def test_tensors_that_native_code_would_misread(untouched: Team, field: str, dtype: str) -> None:
    tape = whole_tape(untouched)
    for make, found in (
        (lambda each: each[:2].clone(), rf"torch.{dtype} \(2,\)"),
        (lambda each: torch.cat([each, each]), rf"torch.{dtype} \(6,\)"),
        (lambda each: each[:, None].clone(), rf"torch.{dtype} \(3, 1\)"),
        (lambda each: each.to(torch.int16), r"torch.int16 \(3,\)"),
        (
            lambda each: torch.stack([each, each], 1)[:, 0],
            rf"torch.{dtype} \(3,\) on cpu with strides \(2,\)",
        ),
        (lambda each: each.to("meta"), rf"torch.{dtype} \(3,\) on meta"),
    ):
        step = whole_step()
        with_(field, make)(step)
        message = rf"^{field} are {found}.*, not contiguous torch.{dtype} \(3,\) on cpu$"
        with pytest.raises(ValueError, match=message):
            tape.run(**step)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (with_("num_tokens", lambda _: 0), "^num_tokens is 0; allowed: 1 or more$"),
        (with_("num_tokens", lambda _: -1), "^num_tokens is -1; allowed: 1 or more$"),
        (without("token_ids"), "^token_ids is None; allowed: one for each of the 3 tokens$"),
        (without("positions"), "^positions is None; allowed: one for each of the 3 tokens$"),
        (with_("tables", lambda _: ()), "^tables are of 0 groups; allowed: 2 or more$"),
        (with_("tables", lambda each: each[:1]), "^tables are of 1 groups; allowed: 2 or more$"),
        (
            with_table(0, query_starts=array("i")),
            r"^tables\[0\].query_starts has 0 numbers; allowed: from 2 to 4$",
        ),
        (
            with_table(0, query_starts=array("i", [0])),
            r"^tables\[0\].query_starts has 1 numbers; allowed: from 2 to 4$",
        ),
        (
            with_table(0, query_starts=array("i", range(5))),
            r"^tables\[0\].query_starts has 5 numbers; allowed: from 2 to 4$",
        ),
        (
            with_table(0, query_starts=array("q", [0, 1, 3])),
            r"^tables\[0\].query_starts has numbers of type 'q'; allowed: 'i'$",
        ),
        (
            with_table(1, query_starts=array("i", [0, 2, 3])),
            r"^tables\[1\].query_starts is \[0, 2, 3\]; allowed: \[0, 1, 3\], as of tables\[0\]$",
        ),
        (
            with_table(1, query_starts=array("i", [0, 3])),
            r"^tables\[1\].query_starts is \[0, 3\]; allowed: \[0, 1, 3\], as of tables\[0\]$",
        ),
        (
            with_table(0, blocks=array("i", [0, 1, 2])),
            r"^tables\[0\].blocks has 3 numbers; allowed: 4, 2 for each of 2 sequences$",
        ),
        (
            with_table(1, blocks=array("i", [0, 2])),
            r"^tables\[1\].blocks has 2 numbers; allowed: 4, 2 for each of 2 sequences$",
        ),
        (
            with_table(1, stride=3),
            r"^tables\[1\].blocks has 4 numbers; allowed: 6, 3 for each of 2 sequences$",
        ),
        (
            with_table(1, blocks=array("h", [0, 2, 1, -1])),
            r"^tables\[1\].blocks has numbers of type 'h'; allowed: 'i'$",
        ),
        (with_("inputs", lambda _: []), "^inputs are 0 tensors; allowed: 1$"),
        (with_("inputs", lambda each: each * 2), "^inputs are 2 tensors; allowed: 1$"),
        (with_rows(lambda each: each[:2]), r"^inputs\[0\] are torch.float32 \(2, 32\) .*not .*\(3, 32\)"),
        (
            with_rows(lambda each: each.repeat(2, 1)),
            r"^inputs\[0\] are torch.float32 \(6, 32\) .*not .*\(3, 32\)",
        ),
        (with_rows(lambda each: each[:, :31]), r"^inputs\[0\] are torch.float32 \(3, 31\) .*not .*\(3, 32\)"),
        (with_rows(lambda each: each[:, :1]), r"^inputs\[0\] are torch.float32 \(3, 1\) .*not .*\(3, 32\)"),
        # As wide as the buffer.
        (
            with_rows(lambda each: each.repeat(1, 2)),
            r"^inputs\[0\] are torch.float32 \(3, 64\) .*not .*\(3, 32\)",
        ),
        (with_rows(lambda each: each[0]), r"^inputs\[0\] are torch.float32 \(32,\) .*not .*\(3, 32\)"),
        (with_rows(torch.Tensor.double), r"^inputs\[0\] are torch.float64 \(3, 32\) .*not torch.float32"),
        (with_rows(lambda each: each.to("meta")), r"^inputs\[0\] are .* on meta, not .*on cpu$"),
        (without("best", "draws"), "^allowed is given without best; allowed: None$"),
        (without("best", "allowed"), "^draws is given without best; allowed: None$"),
        (
            with_("allowed", torch.Tensor.long),
            r"^allowed are torch.int64 \(3, 1\).*not contiguous torch.int32",
        ),
        (with_("allowed", lambda each: each[:2]), r"^allowed are torch.int32 \(2, 1\).*not .*\(3, 1\)"),
        (with_("allowed", lambda each: each[:, 0]), r"^allowed are torch.int32 \(3,\).*not .*\(3, 1\)"),
        (
            with_("allowed", lambda each: each.repeat(1, 2)[:, ::2]),
            r"^allowed are torch.int32 \(3, 1\) .*strides \(2, 2\), not contiguous",
        ),
    ],
)
def test_steps_of_wrong_shapes(
    untouched: Team, spoil: Callable[[dict[str, Any]], None], problem: str
) -> None:
    step = whole_step()
    spoil(step)
    with pytest.raises(ValueError, match=problem):
        whole_tape(untouched).run(**step)


def test_picks_that_were_not_recorded(untouched: Team) -> None:
    step = whole_step()
    pick = {name: step[name] for name in ("best", "allowed", "draws")}
    for picks, problem in (
        (False, "^best is given; allowed: None, as the recording finds no best tokens$"),
        (True, "^draws is given; allowed: None, as the recording draws no tokens$"),
    ):
        recorder = cast(Any, TapeRecorder())
        rows = recorder.rows(WIDTH)
        if picks:
            best_tokens(rows)
        tape = Tape(recorder.finish(rows), untouched)
        with pytest.raises(ValueError, match=problem):
            tape.run(NUM_TOKENS, inputs=step["inputs"], **pick)


def test_positions_are_wanted_where_only_their_angles_are_recorded(untouched: Team) -> None:
    recorder = cast(Any, TapeRecorder())
    angles, _ = rotary_angles(recorder.positions(), torch.ones(4), torch.float32)
    tape = Tape(recorder.finish(angles), untouched)
    with pytest.raises(ValueError, match=r"^positions is None; allowed: one for each"):
        tape.run(NUM_TOKENS)


def rotated(heads: int = 6, head_dim: int = 8, angles: int = 4, norm: HeadNorm | None = None) -> None:
    """Record the rotation and storing of two KV heads."""
    recorder = cast(Any, TapeRecorder())
    cache = LayerCache(torch.zeros(3, 2, 16, head_dim), torch.zeros(3, 2, 16, head_dim))
    at = rotary_angles(recorder.positions(), torch.ones(angles), torch.float32)
    rotary_store_kv(recorder.rows(heads * 8), at, norm, cache, cast(Any, TracedGroup(0, 0)))


def attended(width: int = WIDTH, window: int = 0, **tensors: torch.Tensor) -> None:
    """Record attention to a cache."""
    recorder = cast(Any, TapeRecorder())
    good = {"key": torch.zeros(3, 2, 16, 8), "value": torch.zeros(3, 2, 16, 8)}
    cache = LayerCache(**{**good, **tensors})
    paged_attention(recorder.rows(width), cache, cast(Any, TracedGroup(0, window)))


def codes(**scales: torch.Tensor) -> dict[str, torch.Tensor]:
    zeros, ones = torch.zeros(3, 2, 16, 8, dtype=torch.int8), torch.ones(3, 2, 16)
    return {"key": zeros, "value": zeros, "key_scale": ones, "value_scale": ones, **scales}


def rows(width: int) -> Any:
    return cast(Any, TapeRecorder()).rows(width)


def test_what_the_next_test_spoils_is_recorded() -> None:
    rotated(norm=HeadNorm(torch.ones(4, 8), 1e-5))
    attended()
    attended(**codes())


@pytest.mark.parametrize(
    ("attempt", "problem"),
    [
        (lambda: rms_norm(rows(8), torch.ones(7), 1e-5), r"weight's shape is \(7,\); allowed: \(8,\)"),
        (
            lambda: linear(rows(8), NativeWeight.of(torch.randn(4, 9), None)),
            "x's width is 8; allowed: 9",
        ),
        (
            lambda: linear(rows(8), NativeWeight.of(torch.randn(4, 8), None), rows(5)),
            "residual's width is 5; allowed: 4",
        ),
        (lambda: add_rms_norm(rows(8), rows(9), torch.ones(8), 1e-5), "residual's width is 9; allowed: 8"),
        (
            lambda: embedding(cast(Any, TapeRecorder()).token_ids(), torch.randn(8, 11).T),
            "table are .*not contiguous",
        ),
        (lambda: rotated(heads=4), "heads' width is 32; allowed: 40 or more, a multiple of 8"),
        (lambda: rotated(heads=3), "heads' width is 24; allowed: 40 or more, a multiple of 8"),
        (lambda: rotated(angles=3), "angles' width is 6; allowed: 8"),
        (
            lambda: rotated(norm=HeadNorm(torch.ones(6, 8), 1e-5)),
            r"norm.weight's shape is \(6, 8\); allowed: \(4, 8\)",
        ),
        (lambda: attended(width=24), "query's width is 24; allowed: a multiple of 16"),
        (lambda: attended(window=-1), "plan.window is -1; allowed: 0 or more"),
        (lambda: attended(key=torch.zeros(3, 2, 8, 8), value=torch.zeros(3, 2, 8, 8)), "block_size is 8"),
        (lambda: attended(key=torch.zeros(3, 2, 16, 1), value=torch.zeros(3, 2, 16, 1)), "head_dim is 1"),
        (lambda: attended(key=torch.zeros(3, 2, 16)), r"cache.key's shape is \(3, 2, 16\)"),
        (lambda: attended(value=torch.zeros(2, 2, 16, 8)), "cache.value are .*not"),
        (lambda: attended(value=torch.zeros(3, 2, 8, 16).mT), "cache.value are .*not contiguous"),
        (lambda: attended(key=torch.zeros(3, 2, 8, 16).mT), "cache.key are .*not contiguous"),
        (lambda: attended(value=torch.zeros(3, 2, 16, 8).half()), "cache.value are torch.float16"),
        (lambda: attended(key_scale=torch.ones(3, 2, 16)), "cache.value_scale is None; allowed"),
        (lambda: attended(value_scale=torch.ones(3, 2, 16)), "cache.key_scale is None; allowed"),
        (lambda: attended(**codes(key_scale=torch.ones(3, 2, 8))), "cache.key_scale are .*not"),
        (lambda: attended(**codes(value_scale=torch.ones(3, 2, 16).half())), "cache.value_scale are torch.f"),
        (
            lambda: attended(
                **{**codes(), "key": torch.zeros(3, 2, 16, 8), "value": torch.zeros(3, 2, 16, 8)}
            ),
            "cache.key's dtype is torch.float32; allowed beside scales: torch.int8",
        ),
        (lambda: attended(value=torch.zeros(3, 2, 16, 8, device="meta")), "cache.value are .*on meta"),
    ],
)
def test_tensors_that_records_would_read_past_their_end(attempt: Callable[[], None], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        attempt()


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
    with pytest.raises(ValueError, match=str(window)):
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
    with pytest.raises(ValueError, match=problem):
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
