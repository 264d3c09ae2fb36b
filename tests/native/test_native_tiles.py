"""Products with tiles: the order of their sums, rows of any number, and when they are not used."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from helpers import denied_calls_child
from helpers.native_compiler import knows
from helpers.native_nibbles import four_bits, four_bits_and_minimums
from helpers.native_tapes import native_cache, run_records, tables_of
from naiad_kernels.gelu_and_mul import gelu_and_mul
from naiad_kernels.linear import linear
from naiad_kernels.native import variants
from naiad_kernels.native.build import COMPILE_FLAGS, compile_library, compiler, load
from naiad_kernels.native.library import Library
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TracedGroup, TracedRows
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, VARIANTS, best_variant
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache

AMX = VARIANTS[0]
LAY_OUT: dict[str, Callable[[torch.Tensor], NativeWeight]] = {
    "bfloat16": lambda matrix: NativeWeight.of(matrix.bfloat16(), None),
    "narrowed": lambda matrix: NativeWeight.of(matrix.bfloat16(), None, torch.float32),
    "int8": lambda matrix: NativeWeight.quantised(matrix, None),
    "int4": lambda matrix: four_bits(matrix, None),
    "int4_and_minimum": lambda matrix: four_bits_and_minimums(matrix, None),
}
DRIVER = Path(__file__).parent / "driver"
_SMALLEST = Fraction(1, 2**126)


@pytest.fixture(scope="module")
def twin() -> Library:
    return load(PORTABLE_AMX)


def in_float32(exact: Fraction) -> Fraction:
    """Round to nearest even as the tiles do: what is subnormal becomes zero."""
    if not exact:
        return exact
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit
    return rounded if abs(rounded) >= _SMALLEST else Fraction(0)


def documented_sum(w: list[Fraction], *planes: list[Fraction]) -> float:
    """An output as Intel documents TDPBF16PS, number after number, of inputs in one part or several."""
    w, *planes = ([each if abs(each) >= _SMALLEST else Fraction(0) for each in row] for row in (w, *planes))
    total = Fraction(0)
    for first, x in itertools.product(range(0, len(w), 32), planes):
        parts = []
        for parity in (0, 1):
            part = Fraction(0)
            for i in range(first + parity, min(first + 32, len(w)), 2):
                part = in_float32(x[i] * w[i] + part)
            parts.append(part)
        total = in_float32(total + in_float32(parts[0] + parts[1]))
    return float(total)


def as_fractions(matrix: torch.Tensor) -> list[list[Fraction]]:
    return [[Fraction(each) for each in row] for row in matrix.double().tolist()]


@pytest.mark.parametrize("exponent", [0, -63, -64, -126], ids=str)
def test_sums_have_the_documented_order(twin: Library, exponent: int) -> None:
    """Also where products, sums or inputs are about as small as numbers can be."""
    generator = torch.Generator().manual_seed(exponent)
    x = torch.randn(3, 101, generator=generator) * 2.0**exponent
    weight = torch.randn(21, 101, generator=generator) * (2.0**exponent if exponent > -100 else 1)
    x, weight = x.bfloat16(), weight.bfloat16()
    rows, columns = as_fractions(x), as_fractions(weight)
    expected = torch.tensor([[documented_sum(column, row) for column in columns] for row in rows])
    made = run_records(twin.new_team(1), lambda _, x: linear(x, NativeWeight.of(weight, None)), x.float())
    assert torch.equal(made, expected)
    assert expected.count_nonzero() > 20


def test_float32_is_multiplied_in_three_parts(twin: Library) -> None:
    """Each step of 32 inputs by the largest parts first."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 101, generator=generator), torch.randn(21, 101, generator=generator).bfloat16()
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    assert not rest.any()
    columns, planes = as_fractions(weight), [as_fractions(part) for part in parts]
    expected = [[documented_sum(column, *row) for column in columns] for row in zip(*planes, strict=True)]
    narrowed = NativeWeight.of(weight, None, torch.float32)
    made = run_records(twin.new_team(1), lambda _, x: linear(x, narrowed), x)
    assert torch.equal(made, torch.tensor(expected))


def test_the_order_is_not_that_of_vectors(twin: Library) -> None:
    """Or a test of the order would prove nothing."""
    x, weight = torch.randn(5, 256), LAY_OUT["bfloat16"](torch.randn(64, 256))
    made = [
        run_records(library.new_team(1), lambda _, x: linear(x, weight), x)
        for library in (twin, load(PORTABLE))
    ]
    assert not torch.equal(*made)
    assert torch.allclose(*made, atol=1e-4)


def attended(library: Library, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token's attention to `[num_keys, num_heads, head_dim]`."""
    num_keys, num_heads, head_dim = keys.shape
    cache = LayerCache(*(torch.full((3, num_heads, 64, head_dim), torch.nan).bfloat16() for _ in range(2)))
    for part, whole in ((cache.key, keys), (cache.value, values)):
        for key in range(num_keys):
            part[key // 64, :, key % 64] = whole[key]
    cache = native_cache(cache)
    made = run_records(
        library.new_team(1),
        lambda _, query: paged_attention(query, cache, TracedGroup(0, 0), 1.0),
        query.flatten()[None],
        positions=torch.tensor([num_keys - 1]),
        tables=tables_of([1], [[0, 1, 2]]),
    )
    return made.view(num_heads, head_dim)


@pytest.mark.parametrize("num_keys", [1, 31, 33, 75, 140])
def test_weighted_values_have_the_documented_order(twin: Library, num_keys: int) -> None:
    """A query of zeros gives every key the weight 1."""
    values = torch.randn(num_keys, 2, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = attended(twin, torch.zeros(2, 48), torch.randn(values.shape).bfloat16(), values)
    ones = [Fraction(1)] * num_keys
    columns = as_fractions(values.flatten(1).T)
    sums = torch.tensor([documented_sum(column, ones) for column in columns])
    assert torch.equal(made.flatten(), sums * (1 / torch.tensor(float(num_keys))))


def test_scores_have_the_documented_order(twin: Library) -> None:
    """Large numbers that cancel each other show it; the second key weighs the sigmoid of its score."""
    num_heads, head_dim = 40, 64
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.zeros(2, num_heads, head_dim), torch.zeros(2, num_heads, head_dim)
    keys[1] = torch.randn(num_heads, head_dim, generator=generator)
    for head in range(num_heads):
        places = torch.randperm(head_dim, generator=generator)[:4]
        keys[1, head, places] = torch.tensor([2.0**24, -(2.0**24), 2.0**24, -(2.0**24)])
    values[1] = 1
    query, keys, values = torch.ones(num_heads, head_dim), keys.bfloat16(), values.bfloat16()
    ones = [Fraction(1)] * head_dim
    scores = torch.tensor([documented_sum(ones, row) for row in as_fractions(keys[1])])
    expected = scores.sigmoid()[:, None].expand(-1, head_dim)
    assert (expected - 0.5).abs().min() < 0.4
    assert torch.allclose(attended(twin, query, keys, values), expected, atol=5e-3)
    assert not torch.allclose(attended(load(PORTABLE), query, keys, values), expected, atol=0.1)


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33, 40])
@pytest.mark.parametrize("shape", [(37, 51), (200, 130), (16, 640), (1, 1)], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4", "int4_and_minimum"])
def test_whole_numbers_have_the_bits_of_vectors(
    twin: Library, weights: str, shape: tuple[int, int], num_rows: int
) -> None:
    x, weight = torch.randn(num_rows, shape[1]), LAY_OUT[weights](torch.randn(shape))
    made = [
        run_records(library.new_team(2), lambda _, x: linear(x, weight), x)
        for library in (twin, load(PORTABLE))
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("weights", list(LAY_OUT))
def test_a_narrow_layer_of_very_many_rows(twin: Library, weights: str) -> None:
    """There are more tiles of rows than lines to read ahead, so some have none to read."""
    x, weight = torch.randn(1100, 64), LAY_OUT[weights](torch.randn(80, 64))
    made = run_records(twin.new_team(1), lambda _, x: linear(x, weight), x)
    assert torch.equal(made[:7], run_records(twin.new_team(1), lambda _, x: linear(x, weight), x[:7]))
    assert torch.equal(made[-7:], run_records(twin.new_team(1), lambda _, x: linear(x, weight), x[-7:]))


def layer(x: TracedRows, gate: str, up: NativeWeight, down: NativeWeight) -> TracedRows:
    whole = linear(x, up)
    return linear(silu_and_mul(whole) if gate == "silu" else gelu_and_mul(whole, gate), down, x)


@pytest.mark.parametrize("dtype", list(LAY_OUT))
@pytest.mark.parametrize("gate", ["silu", "tanh"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(twin: Library, gate: str, dtype: str) -> None:
    """Gated, and added to its input; 11 panels are no multiple of what is computed together."""
    up, down = (LAY_OUT[dtype](torch.randn(shape) * 0.1) for shape in ((2 * 176, 70), (70, 176)))
    x = torch.randn(40, 70)
    teams = [twin.new_team(num_threads) for num_threads in (1, 2, 3)]
    whole = run_records(teams[0], lambda _, x: layer(x, gate, up, down), x)
    assert whole.isfinite().all()
    for num_rows in range(1, 41):
        team, first = teams[num_rows % 3], 40 - num_rows
        made = run_records(team, lambda _, x: layer(x, gate, up, down), x[first:])
        assert torch.equal(made, whole[first:]), num_rows


@pytest.mark.parametrize("dtype", list(LAY_OUT))
@pytest.mark.parametrize("num_rows", [129, 257, 385])
def test_members_with_rows_of_their_own(twin: Library, num_rows: int, dtype: str) -> None:
    """Two or three members have enough for that in some products; their numbers and their tiles differ."""
    up, down = (LAY_OUT[dtype](torch.randn(shape) * 0.1) for shape in ((2 * 176, 70), (70, 176)))
    x = torch.randn(num_rows, 70)
    alone = run_records(twin.new_team(1), lambda _, x: layer(x, "silu", up, down), x)
    assert alone.isfinite().all()
    for library in (twin, load(AMX)) if AMX.runs_here else (twin,):
        for num_threads in (2, 3):
            made = run_records(library.new_team(num_threads), lambda _, x: layer(x, "silu", up, down), x)
            assert torch.equal(made, alone), (library.name, num_threads)
    few = run_records(twin.new_team(1), lambda _, x: layer(x, "silu", up, down), x[-9:])
    assert torch.equal(few, alone[-9:])


def test_an_amx_machine_uses_tiles_where_linux_grants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "cpu_flags", lambda: AMX.needs)
    monkeypatch.setattr(variants, "grants_amx", lambda: True)
    assert best_variant() == AMX
    monkeypatch.setattr(variants, "grants_amx", lambda: False)
    fallback = best_variant()
    assert fallback is not None
    assert fallback.name == "avx512_bf16"


@pytest.mark.skipif(best_variant() is None, reason="no variant but the portable one runs on this CPU")
def test_a_process_whose_seccomp_profile_denies_tiles_uses_vectors() -> None:
    """The profile denies a memory policy too, which is told once."""
    run = subprocess.run(
        [sys.executable, denied_calls_child.__file__],
        env={**os.environ, "PYTHONPATH": str(DRIVER.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == denied_calls_child.NO_FILTER:
        pytest.skip("Linux takes no seccomp filter of this process")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert not found["has_tiles"]
    fastest = next(each for each in VARIANTS if each != AMX and each.runs_here)
    assert found["variant"] == fastest.name
    assert found["product"] == denied_calls_child.product_of(load(fastest))
    assert found["log"] == ["weights are not spread over the memory nodes [0, 1]: Operation not permitted"]


@pytest.mark.parametrize("missing", ["amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"])
def test_tiles_are_not_asked_for_where_the_cpu_lacks_something(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse() -> bool:
        raise AssertionError("asked for")

    monkeypatch.setattr(variants, "cpu_flags", lambda: AMX.needs - {missing})
    monkeypatch.setattr(variants, "grants_amx", refuse)
    assert not AMX.runs_here


def test_the_real_form_compiles(tmp_path: Path) -> None:
    """On every machine, whatever its CPU; the assembler sees the instructions."""
    if not knows(AMX):
        pytest.skip(f"the compiler is too old for {' '.join(AMX.compile_flags)}")
    flags = (*COMPILE_FLAGS, *AMX.compile_flags, "-O0", "-Wall", "-Wextra", "-Werror")
    compile_library([*compiler(), *flags], tmp_path / "amx.so")


@pytest.mark.skipif(
    "amx_tile" in variants.cpu_flags()
    or not AMX.needs - {"amx_tile", "amx_bf16", "amx_int8"} <= variants.cpu_flags(),
    reason="this CPU runs AMX itself, or lacks the other instructions of that variant",
)
def test_the_real_form_gives_the_bits_of_its_twin(tmp_path: Path) -> None:
    """Its instructions of tiles trap on this CPU, and a handler computes each as Intel documents it."""
    if not knows(AMX):
        pytest.skip(f"the compiler is too old for {' '.join(AMX.compile_flags)}")
    traps = tmp_path / "amx_traps.so"
    flags = ("-std=c++17", "-O2", "-mfma", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
    source, warnings = str(DRIVER / "amx_traps.cpp"), ("-Wall", "-Wextra", "-Werror")
    subprocess.run([*compiler(), *flags, *warnings, source, "-o", str(traps)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["PYTHONPATH"] = str(DRIVER.parents[1])
    run = subprocess.run(
        [sys.executable, str(DRIVER / "trapped.py"), str(traps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shaped, released = map(int, run.stdout.split())
    assert shaped == released > 0
