"""A row's bits depend on its own sequence alone; vectors give float32 the same ones everywhere."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_reference
from helpers.native_nibbles import four_bits, four_bits_and_minimums
from helpers.native_tapes import native_cache, positions_of, run_records, tables_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner, native_kernels
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams
from naiad_kernels.linear import linear
from naiad_kernels.native.library import Library, Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TracedGroup
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, Variant
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache

BLOCK = 16
LAY_OUT = {
    "narrowed": partial(NativeWeight.of, dtype=torch.float32),
    "int8": NativeWeight.quantised,
    "int4": four_bits,
    "int4_and_minimum": four_bits_and_minimums,
}


def layer(team: Team, x: torch.Tensor, up: NativeWeight, down: NativeWeight) -> torch.Tensor:
    norm = torch.linspace(0.5, 1.5, x.shape[1])
    return run_records(
        team, lambda _, x: linear(silu_and_mul(linear(rms_norm(x, norm, 1e-5), up)), down, x), x
    )


@pytest.mark.parametrize("num_rows", [1, 9, 150, 257])
@pytest.mark.parametrize(
    "weights", ["float32", "narrowed", "float16", "bfloat16", "int8", "int4", "int4_and_minimum"]
)
def test_every_variant_gives_the_bits_of_its_portable_twin(
    library: Library, portable: Team, weights: str, num_rows: int
) -> None:
    """Few members share many rows, others the outputs; with tiles that takes more rows."""
    generator = torch.Generator().manual_seed(0)
    lay_out = LAY_OUT.get(weights, NativeWeight.of)
    matrices = [torch.randn(shape, generator=generator).mul_(0.1) for shape in ((416, 100), (100, 208))]
    if weights in ("bfloat16", "narrowed"):
        matrices = [each.bfloat16() for each in matrices]
    elif weights == "float16":
        # Kept in 16 bits, and multiplied by floats.
        matrices = [each.half().float() for each in matrices]
    up, down = (lay_out(each, None) for each in matrices)
    x = torch.randn(num_rows, 100, generator=generator)
    expected = layer(portable, x, up, down)
    for num_threads in (1, 2, 5):
        assert torch.equal(layer(library.new_team(num_threads), x, up, down), expected)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("weights", ["float32", "narrowed", "float16", "bfloat16", "int8"])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(
    team: Team, weights: str, is_gated: bool
) -> None:
    """Many rows may take blocks of inputs, of which there are several here, and the last one is short."""
    generator = torch.Generator().manual_seed(0)
    matrix, bias = torch.randn(96, 450, generator=generator), torch.randn(96, generator=generator)
    if weights == "float16":
        # Kept in 16 bits, and multiplied by floats.
        matrix = matrix.half().float()
    lay_out = LAY_OUT.get(weights, NativeWeight.of)
    weight = lay_out(matrix.bfloat16() if weights in ("bfloat16", "narrowed") else matrix, bias)
    x = torch.randn(200, 450, generator=generator)

    def product(num_rows: int) -> torch.Tensor:
        gate = silu_and_mul if is_gated else (lambda each: each)
        return run_records(team, lambda _, x: gate(linear(x, weight)), x[:num_rows])

    whole = product(200)
    for num_rows in (1, 2, 15, 16, 17, 95, 97, 193):
        assert torch.equal(product(num_rows), whole[:num_rows]), num_rows


@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 700])
def test_attention_gives_the_bits_of_the_portable_twin(
    library: Library, portable: Team, window: int, dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    """Long contexts are split over threads; the splits do not depend on how many there are."""
    case = AttentionCase(
        [(1, 1500), (3, 900)], heads=(6, 2, 64), dtype=dtype, window=window, cache_dtype=codes
    )

    def attention(team: Team) -> torch.Tensor:
        cache = native_cache(case.cache(), dtype)
        return run_records(
            team,
            lambda _, query: paged_attention(query, cache, TracedGroup(0, window)),
            case.query.float().flatten(1),
            dtype=dtype,
            positions=positions_of(case.query_lens, case.seq_lens),
            tables=tables_of(case.query_lens, case.tables),
        )

    expected = attention(portable)
    assert expected.isfinite().all()
    for num_threads in (1, 2, 5):
        assert torch.equal(attention(library.new_team(num_threads)), expected)


@pytest.mark.parametrize("window", [512, 513])
@pytest.mark.parametrize("steps", [[(5, 1027)], [(13, 1036)], [(2, 513), (3, 1025)]], ids=str)
def test_windows_that_leave_a_split_within_the_step(
    library: Library, portable: Team, steps: list[tuple[int, int]], window: int
) -> None:
    """An earlier tile then sees more splits than a later one."""
    case = AttentionCase(steps, heads=(9, 1, 48), window=window)
    cache = native_cache(case.cache())
    made = [
        run_records(
            team,
            lambda _, query: paged_attention(query, cache, TracedGroup(0, window)),
            case.query.float().flatten(1),
            positions=positions_of(case.query_lens, case.seq_lens),
            tables=tables_of(case.query_lens, case.tables),
        )
        for team in (portable, library.new_team(1), library.new_team(2), library.new_team(5))
    ]
    assert_close_to_reference(made[0], case.expected())
    assert all(torch.equal(each, made[0]) for each in made)


@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "soft_cap", "block_size", "head_dim"), [(0, 0.0, 64, 64), (45, 0.0, 16, 48), (0, 3.0, 32, 10)]
)
def test_a_row_of_attention_has_the_same_bits_in_any_step(
    library: Library,
    window: int,
    soft_cap: float,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    codes: torch.dtype | None,
) -> None:
    """In a prompt computed at once, in chunks of any size, token by token, and beside other sequences."""
    length, heads = 555, (3, 1, head_dim)
    case = AttentionCase(
        [(length, length), (40, 100)],
        heads=heads,
        block_size=block_size,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
        cache_dtype=codes,
    )
    cache, queries = native_cache(case.cache(), dtype), case.query.float().flatten(1)

    def rows(first: int, end: int, num_threads: int, beside: int = 0) -> torch.Tensor:
        """Those of the first sequence; `beside`: so many rows of the other one come first."""
        lens = [beside, end - first] if beside else [end - first]
        ends, tables = ([100, end], case.tables[::-1]) if beside else ([end], case.tables[:1])
        query = torch.cat((queries[length + 40 - beside :], queries[first:end]))
        made = run_records(
            library.new_team(num_threads),
            lambda _, query: paged_attention(query, cache, TracedGroup(0, window), soft_cap=soft_cap),
            query,
            dtype=dtype,
            positions=positions_of(lens, ends),
            tables=tables_of(lens, tables),
        )
        return made[beside:]

    whole = rows(0, length, 1)
    assert_close_to_reference(whole.to(dtype), case.expected()[:length])
    for first, end in ((0, 7), (7, 200), (200, 533), (533, length)):
        assert torch.equal(rows(first, end, 2), whole[first:end])
        assert torch.equal(rows(first, end, 3, beside=40), whole[first:end])
    for row in (0, 15, 16, 31, 100, 511, 512, 513, length - 1):
        assert torch.equal(rows(row, row + 1, 1 + row % 3), whole[row : row + 1])
        assert torch.equal(rows(row, row + 1, 1, beside=1), whole[row : row + 1])


@pytest.mark.parametrize("position", [510, 511, 512, 513])
def test_a_key_that_is_not_a_number_shows(team: Team, position: int) -> None:
    """Also where it is the only key of its split."""
    keys, values = torch.randn(33, 1, 16, 8), torch.randn(33, 1, 16, 8)
    keys[position // 16, 0, position % 16] = torch.nan
    cache = native_cache(LayerCache(keys, values))
    result = run_records(
        team,
        lambda _, query: paged_attention(query, cache, TracedGroup(0, 0)),
        torch.randn(1, 8),
        positions=torch.tensor([position]),
        tables=tables_of([1], [list(range(33))]),
    )
    assert result.isnan().all()


def logits_of(
    runner: ModelRunner, texts: list[list[int]], chunks: list[int], shuffled: random.Random
) -> list[bytes]:
    """The context logits of every token of each text, computed together in chunks."""
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    made = [b""] * len(texts)
    starts = [0] * len(texts)
    num_blocks = 8
    while any(start < len(text) for start, text in zip(starts, texts, strict=True)):
        rows, order = [], list(range(len(texts)))
        shuffled.shuffle(order)
        for number in order:
            text, start = texts[number], starts[number]
            if start < len(text):
                end = min(len(text), start + shuffled.choice(chunks))
                blocks = list(range(number * num_blocks, (number + 1) * num_blocks))
                rows.append(LoneRow(number, text[:end], start, blocks, params))
                starts[number] = end
        for number, logits in runner.run(lone_step(rows)).context_logits.items():
            made[number] += logits
    return made


def check_rows_alone_and_together(
    directory: Path,
    architecture: str,
    dtype: str,
    quantization: str,
    lengths: list[int],
    kv_cache_dtype: str = "auto",
    stored: str = "bfloat16",
) -> None:
    """Compare logits of texts alone and together. `stored` is the dtype of the checkpoint's weights."""
    make_tiny_model(directory, architecture).to(getattr(torch, stored)).save_pretrained(directory)
    config = EngineConfig(
        model_dir=str(directory),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK,
        max_num_batched_tokens=256,
        kv_cache_bytes=1 << 24,
        batch_invariant=True,
    )
    runner = ModelRunner(config)
    draw = random.Random(5)
    texts = [[draw.randrange(96) for _ in range(length)] for length in lengths]
    alone = [logits_of(runner, [text], [1000], draw)[0] for text in texts]
    for chunks in ([1000], [1], [3, 7, 20]):
        assert logits_of(runner, texts, chunks, draw) == alone


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_logits_are_bitwise_the_same_alone_and_in_any_batch_and_chunks(
    tmp_path: Path, architecture: str, dtype: str, stored: str, quantization: str
) -> None:
    lengths = [1, 17, 40, 63, 100, 5]
    check_rows_alone_and_together(tmp_path, architecture, dtype, quantization, lengths, stored=stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_logits_over_codes_are_bitwise_the_same_alone_and_in_any_batch_and_chunks(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    check_rows_alone_and_together(tmp_path, architecture, dtype, "none", [1, 17, 40, 63, 100, 5], "int8")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_tiles_are_bitwise_the_same_alone_and_in_any_batch_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, quantization: str
) -> None:
    monkeypatch.setattr(native_kernels, "usable_variants", lambda: iter([PORTABLE_AMX]))
    check_rows_alone_and_together(tmp_path, "LlamaForCausalLM", dtype, quantization, [1, 17, 40])


def log_probs_of(
    directory: Path,
    dtype: str,
    variant: Variant,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str = "none",
) -> torch.Tensor:
    """A tiny model's `[tokens, vocabulary]` in a text, computed by that variant."""
    monkeypatch.setattr(native_kernels, "usable_variants", lambda: iter([variant]))
    config = EngineConfig(
        model_dir=str(directory),
        dtype=dtype,
        quantization=quantization,
        block_size=BLOCK,
        kv_cache_bytes=1 << 24,
    )
    text = [random.Random(3).randrange(96) for _ in range(100)]
    logits = logits_of(ModelRunner(config), [text], [1000], random.Random(0))[0]
    values = torch.frombuffer(bytearray(logits), dtype=torch.float32)
    return values.view(len(text), -1).double().log_softmax(1)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_tiles_differ_from_vectors_by_less_than_rounding_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """In float32 by far less. Weights are those of a checkpoint in bfloat16."""
    make_tiny_model(tmp_path, architecture).bfloat16().save_pretrained(tmp_path)
    found = {
        (dtype, variant.name): log_probs_of(tmp_path, dtype, variant, monkeypatch)
        for dtype in ("float32", "bfloat16")
        for variant in (PORTABLE, PORTABLE_AMX)
    }

    def distance(left: tuple[str, str], right: tuple[str, str]) -> float:
        return float((found[left] - found[right]).square().mean().sqrt())

    exact, rounded = ("float32", "portable"), ("bfloat16", "portable")
    rounding = distance(exact, rounded)
    assert 0 < distance(rounded, ("bfloat16", "portable_amx")) < rounding
    assert 0 < distance(exact, ("float32", "portable_amx")) < rounding / 1000


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_tiles_change_no_products_of_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, quantization: str
) -> None:
    """In bfloat16 attention uses tiles, and so changes by less than rounding; in float32 nothing does."""
    make_tiny_model(tmp_path, architecture).bfloat16().save_pretrained(tmp_path)
    exact, exact_tiles, rounded, rounded_tiles = (
        log_probs_of(tmp_path, dtype, variant, monkeypatch, quantization)
        for dtype in ("float32", "bfloat16")
        for variant in (PORTABLE, PORTABLE_AMX)
    )
    assert exact.equal(exact_tiles)
    rounding = (rounded - exact).square().mean()
    assert 0 < (rounded_tiles - rounded).square().mean() < rounding
