from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from perf.kernels import elements
from perf.kernels.bench import FAMILIES, measure_case, measure_family
from perf.kernels.cases import Case, Rival, WrongResultError, equals
from perf.kernels.ceilings import Ceilings, measure_ceilings
from perf.kernels.clock import Clock
from perf.kernels.elements import element_cases
from perf.kernels.sizes import TINY
from perf.kernels.targets import TARGETS, verdict
from torch import Tensor

from naiad_kernels.rms_norm import add_rms_norm
from naiad_kernels.rotary_store_kv import rotary_store_kv
from naiad_kernels.store_kv import LayerCache, Slots, store_kv

# Measured on a GPU, it is compiled there.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")
CLOCK = Clock(CPU, repeats=2)
CEILINGS = Ceilings(bytes_per_s=1e9, flops_per_s=1e9)
ONES = torch.ones(4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("family", list(FAMILIES))
@torch.inference_mode()
def test_every_family_is_rehearsed_on_a_cpu(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure_family(FAMILIES[family](TINY, CPU), CLOCK, CEILINGS, judges=False)
    assert len(rows) == len(capsys.readouterr().out.splitlines()) - 1
    for row in rows:
        assert row["note"] == ("" if row["us"] else "not installed")
        assert row["who"] != "naiad" or row["us"] > 0
        for name in ("tb_per_s", "of_copy", "tflops_per_s", "of_product", "logits_passes"):
            assert row[name] is None or 0 < row[name] < math.inf


@torch.inference_mode()
def test_attention_is_measured_beside_what_is_installed() -> None:
    rows = measure_family(FAMILIES["attention"](TINY, CPU), CLOCK, CEILINGS, judges=False)
    beside = {row["who"] for row in rows if row["us"]}
    assert {"naiad", "SDPA", "FlexAttention", "transformers, paged"} <= beside


def test_ceilings_count_what_is_read_and_written() -> None:
    ceilings = measure_ceilings(TINY, CPU, CLOCK)
    assert 0 < ceilings.bytes_per_s < 1e13
    assert 0 < ceilings.flops_per_s < 1e15


def case(**changes: object) -> Case:
    whole = Case("copy", "4", run=lambda: ONES, check=equals("copy", lambda: ONES), num_bytes=32)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_shares_are_of_the_ceilings() -> None:
    (row,) = measure_case(case(flops=8, logits_bytes=16), CLOCK, CEILINGS, judges=False)
    seconds = 1e-6 * row["us"]
    assert row["of_copy"] == pytest.approx(32 / seconds / 1e9)
    assert row["of_product"] == pytest.approx(8 / seconds / 1e9)
    assert row["logits_passes"] == pytest.approx(seconds * 1e9 / 16)


@pytest.mark.parametrize("wrong", [ONES * 1.01, ONES * torch.nan])
def test_no_speed_of_a_wrong_result_is_told(wrong: torch.Tensor) -> None:
    with pytest.raises(WrongResultError, match="copy: differs"):
        measure_case(case(run=lambda: wrong), CLOCK, CEILINGS, judges=False)
    rivals = {"other": Rival(lambda: wrong)}
    with pytest.raises(WrongResultError, match="other, copy 4: differs"):
        measure_case(case(rivals=rivals), CLOCK, CEILINGS, judges=False)


def _case_of(op: str) -> Case:
    return next(each for each in element_cases(TINY, CPU) if each.op == op)


def _store_no_values(key: Tensor, value: Tensor, cache: LayerCache, slots: Slots) -> None:
    store_kv(key, torch.zeros_like(value), cache, slots)


def _fused_without(name: str) -> Callable[..., Tensor]:
    """Leaves the keys or the values of the cache empty."""

    def run(heads: Tensor, angles: Any, weight: None, cache: LayerCache, slots: Slots) -> Tensor:
        made = rotary_store_kv(heads, angles, weight, cache, slots)
        getattr(cache, name).zero_()
        return made

    return run


def _norm_without_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, eps)[0], x


@pytest.mark.parametrize(
    ("op", "wrong", "output"),
    [
        ("store_kv", _store_no_values, 2),
        ("rotary_store_kv", _fused_without("key"), 1),
        ("rotary_store_kv", _fused_without("value"), 2),
        ("add_rms_norm", _norm_without_sum, 1),
    ],
)
@torch.inference_mode()
def test_every_output_of_an_op_is_checked(
    op: str, wrong: Callable[..., Any], output: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _case_of(op)
    right.check(right.run())
    monkeypatch.setattr(elements, op, wrong)
    case = _case_of(op)
    with pytest.raises(WrongResultError, match=f"^{op}, output {output}: differs"):
        case.check(case.run())


@pytest.mark.parametrize(
    ("error", "note"), [(torch.OutOfMemoryError(), "out of memory"), (RuntimeError("no code"), "failed")]
)
def test_a_rival_that_fails_has_a_note_and_no_time(error: Exception, note: str) -> None:
    def fail() -> torch.Tensor:
        raise error

    row = measure_case(case(rivals={"other": Rival(fail)}), CLOCK, CEILINGS, judges=False)[1]
    assert (row["us"], row["note"]) == (None, note)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_met_or_missed(name: str) -> None:
    target = TARGETS[name]
    better = target.bound * (0.9 if target.is_most else 1.1)
    worse = target.bound * (1.1 if target.is_most else 0.9)
    assert verdict(name, {target.figure: better}).startswith("met")
    assert verdict(name, {target.figure: worse}).startswith("missed")
    assert verdict(name, {target.figure: None}).startswith("not measured")


def test_cublas_is_what_a_product_is_judged_by() -> None:
    judged = case(rivals={"cuBLAS": Rival(lambda: ONES)}, target="FP8 product")
    ours, rival = measure_case(judged, CLOCK, CEILINGS, judges=True)
    assert ours["of_cublas"] == rival["slower"] == pytest.approx(rival["us"] / ours["us"])
    assert ours["target"] == verdict("FP8 product", ours) != ""
