from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from perf.peers.adapter_process import Decoded
from perf.peers.arena import Arena
from perf.peers.bounds import Bounds, bound_meter
from perf.peers.compiled import compiled
from perf.peers.contestants import Contestant
from perf.peers.peak_products import fastest
from perf.peers.shapes import Shape
from perf.peers.summary import tokens_per_s

from naiad.errors import StartupError
from naiad_kernels.native.variants import cpu_flags

V4 = ["avx2", "fma", "avx512f", "avx512bw"]


@pytest.mark.parametrize(
    ("flags", "has_tiles", "functions"),
    [
        (["avx2", "fma"], False, {32: "fma_256", 16: "fma_256", 8: "bytes_256"}),
        (["avx2", "fma", "avx_vnni"], False, {32: "fma_256", 16: "fma_256", 8: "vnni_256"}),
        (V4, False, {32: "fma_512", 16: "fma_512", 8: "bytes_512"}),
        ([*V4, "avx512_vnni", "avx512_bf16"], False, {32: "fma_512", 16: "bf16_512", 8: "vnni_512"}),
        (
            [*V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"],
            True,
            {32: "tiles_bf16", 16: "tiles_bf16", 8: "tiles_int8"},
        ),
        (
            [*V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"],
            False,
            {32: "fma_512", 16: "bf16_512", 8: "vnni_512"},
        ),
    ],
)
def test_the_widest_instruction_that_may_be_used_is_measured(
    flags: Sequence[str], has_tiles: bool, functions: dict[int, str]
) -> None:
    assert {bits: fastest(bits, flags, has_tiles).function for bits in functions} == functions


def test_a_cpu_without_avx2_is_refused() -> None:
    with pytest.raises(StartupError, match="no AVX2 and FMA"):
        fastest(16, ["sse4_2"], False)


@pytest.mark.skipif("avx2" not in cpu_flags(), reason="bounds are measured on x86-64 with AVX2")
def test_this_machines_bounds_are_measured() -> None:
    with bound_meter(1, 1 << 20, cpu_flags()) as meter:
        measured = {bits: meter.measure(1 << 20, bits) for bits in (32, 16, 8)}
        products = {bits: meter.products.product(bits) for bits in measured}
    for each in measured.values():
        assert each.bytes_per_s > 0
        assert each.operations_per_s > 0
    assert products[8].operations >= products[16].operations >= products[32].operations


def test_a_program_that_does_not_compile_is_an_error_with_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "not_a_program.c"
    source.write_text("int f( {")
    with pytest.raises(StartupError, match=r"can not compile not_a_program\.c: .*error"):
        compiled(source, ())


class FakeProcess:
    """Decodes eight tokens in 2 s, after 1 s; with `num_tokens` 0 never all sequences at the same time."""

    def __init__(self, num_tokens: int = 8) -> None:
        self.num_tokens = num_tokens

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Decoded:
        return Decoded(1.0, self.num_tokens, 2.0)

    def resume(self) -> None: ...

    def pause(self) -> None: ...


class FakeArena(Arena):
    """Contestants that are never started; what happens is listed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.events: list[str] = []
        self._config = SimpleNamespace(vocab_size=100)  # type: ignore[assignment]
        self._who = [Contestant(name, "", "fake", "checkpoint", "16-bit", 2, 2, {}) for name in names]
        self._running = dict.fromkeys(self._who)  # type: ignore[assignment]

    def _pass(self, each: Contestant, shape: Shape, seed: int, new_tokens: int) -> float | None:
        self.events.append(f"{each.name}{new_tokens}")
        return 1.0

    def measure(self, each: Contestant) -> Bounds:
        self.events.append(f"bounds {each.name}")
        return Bounds(float(len(self.events)), 1.0)


def test_bounds_are_measured_before_and_after_each_turn() -> None:
    arena = FakeArena(["a", "b"])
    turns = arena.take_turns(Shape("decode", 1, 4, 8), 1, arena.measure)
    warm_ups, measured = arena.events[:2], arena.events[2:]
    assert warm_ups == ["a2", "b2"]
    assert measured == [*("bounds a", "a1", "a8", "bounds a"), *("bounds b", "b1", "b8", "bounds b")]
    # The mean of the third and the sixth event, and of the seventh and the tenth.
    assert [turns[name][0].bounds.bytes_per_s for name in "ab"] == [4.5, 8.5]


def test_decoding_after_long_prompts_is_timed_alone() -> None:
    arena = FakeArena(["a", "b"])
    processes = [FakeProcess(), FakeProcess(0)]
    arena._running = dict(zip(arena._who, processes, strict=True))  # type: ignore[arg-type]
    shape = Shape("context", 2, 4, 11)
    turns = arena.take_turns(shape, 1, arena.measure)
    # Who never generated with all sequences has no figures, and takes part in what follows.
    assert list(turns) == ["a"]
    assert len(arena.running) == 2
    # Eight tokens in 2 s, as if there had been ten steps of two.
    assert tokens_per_s(shape, turns["a"][0]) == pytest.approx(4)
    assert turns["a"][0].first_s == 1.0
