"""A recorded tape, replayed by several threads under the thread sanitizer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.native_tapes import positions_of
from helpers.tape_file import REPLAY_SOURCE, TapeFile
from naiad_kernels.best_tokens import best_tokens
from naiad_kernels.draw_tokens import Draws, draw_tokens
from naiad_kernels.embedding import embedding
from naiad_kernels.kept_threshold import RowFilters
from naiad_kernels.linear import linear
from naiad_kernels.native.build import COMPILE_FLAGS, compiler, load, source_paths
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import Recording, TapeRecorder, TracedGroup
from naiad_kernels.native.tables import NativeTables
from naiad_kernels.native.variants import PORTABLE, PORTABLE_AMX, VARIANTS, Variant
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import rotary_store_kv
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache

pytestmark = pytest.mark.sanitizer

# The first of all has tiles, for which the driver does not ask Linux; its twin shares rows as it does.
VARIANT = next((each for each in VARIANTS[1:] if each.runs_here), PORTABLE)
VOCAB, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 2101, 96, 144, 6, 2, 16, 32, 64
STEPS = {
    # Few tiles and a long context: members share its splits.
    "decode": ([1, 1], [1500, 40]),
    "chunks": ([33, 1, 5], [33, 70, 600]),
    "speculation": ([4, 4, 4], [20, 64, 300]),
    # Two members share the rows of products.
    "a long prompt": ([140], [140]),
}


def recorded(weights: str) -> Recording:
    """Two layers of a decoder with random weights."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.1).to(dtype)

    def weight(outputs: int, inputs: int) -> NativeWeight:
        matrix = random(outputs, inputs)
        if weights == "int8":
            return NativeWeight.quantised(matrix, None)
        # What float16 holds exactly is kept in it.
        return NativeWeight.of(matrix.half().float() if weights == "float16" else matrix, None)

    recorder, group = TapeRecorder(), TracedGroup(0, 0)
    hidden = embedding(recorder.token_ids(), random(VOCAB, HIDDEN))
    angles = rotary_angles(
        recorder.positions(), torch.rand(HEAD_DIM // 2, generator=generator), torch.float32
    )
    normed = rms_norm(hidden, torch.ones(HIDDEN), 1e-5)
    for _ in range(2):
        cache = LayerCache(*(random(BLOCKS, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2)))
        heads = linear(normed, weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
        query = rotary_store_kv(heads.view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM), angles, None, cache, group)
        attended = linear(paged_attention(query, cache, group), weight(HIDDEN, HEADS * HEAD_DIM))
        normed, hidden = add_rms_norm(attended, hidden, torch.ones(HIDDEN), 1e-5)
        gated = silu_and_mul(linear(normed, weight(2 * MLP, HIDDEN)))
        normed, hidden = add_rms_norm(linear(gated, weight(HIDDEN, MLP)), hidden, torch.ones(HIDDEN), 1e-5)
    logits = linear(normed, weight(VOCAB, HIDDEN))
    best_tokens(logits)
    draw_tokens(logits, None, None)
    return recorder.finish(logits)


def draws_of(num_rows: int) -> Draws:
    """Rows without filters, with each, and with all, and greedy ones."""
    number = torch.arange(num_rows)
    filters = RowFilters(
        (number % 5).double() / 2,
        5 * (number % 3),
        torch.where(number % 4 == 1, 0.5, 1.0).double(),
        torch.where(number % 7 == 3, 0.01, 0.0).double().log(),
    )
    return Draws(filters, 12345 * number, torch.zeros(num_rows, dtype=torch.int64))


def tape_file(variant: Variant, weights: str, query_lens: list[int], seq_lens: list[int]) -> TapeFile:
    free = iter(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).tolist())
    tables = [[next(free) for _ in range(0, length, BLOCK)] for length in seq_lens]
    ids = torch.arange(sum(query_lens)) * 7 % VOCAB
    positions = positions_of(query_lens, seq_lens)
    native_tables, draws = NativeTables.of(query_lens, tables), draws_of(len(ids))
    return TapeFile(recorded(weights), load(variant), ids, positions, native_tables, draws)


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(VARIANT, tmp_path_factory.mktemp("driver") / "replay")


def built(variant: Variant, path: Path) -> Path:
    """The driver at that path, with the thread sanitizer."""
    flags = [flag for flag in COMPILE_FLAGS if not flag.startswith("-fsanitize")]
    sources = map(str, [REPLAY_SOURCE, *source_paths()])
    sanitizer = ("-O1", "-g", "-fsanitize=thread")
    command = [*compiler(), *flags, *variant.compile_flags, *sanitizer, *sources, "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def replayed(program: Path, file: Path, num_threads: int, num_runs: int = 20) -> int:
    """The checksum that the driver prints; it fails at the first race."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["TSAN_OPTIONS"] = "halt_on_error=1 exitcode=66"
    # The sanitizer knows where a process lies in memory only without randomisation.
    setarch = [shutil.which("setarch"), platform.machine(), "-R"] if shutil.which("setarch") else []
    command = [*setarch, str(program), str(file), str(num_threads), str(num_runs)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "ThreadSanitizer" not in run.stderr, run.stderr
    return int(run.stdout)


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("step", list(STEPS))
def test_threads_do_not_race(replay: Path, tmp_path: Path, step: str, weights: str) -> None:
    """Several runs of several threads leave in all memory what one thread of the plain build does."""
    file = tape_file(VARIANT, weights, *STEPS[step])
    file.write(tmp_path / "tape")
    expected = file.computed()
    for num_threads in (1, 2, 4):
        assert replayed(replay, tmp_path / "tape", num_threads) == expected


def test_members_with_rows_of_their_own_do_not_race(tmp_path: Path) -> None:
    """With tiles more rows are needed for that. The twin is slow under the sanitizer."""
    program = built(PORTABLE_AMX, tmp_path / "replay")
    for weights, num_rows in (("bfloat16", 260), ("int8", 130)):
        file = tape_file(PORTABLE_AMX, weights, [num_rows], [num_rows])
        file.write(tmp_path / "tape")
        assert replayed(program, tmp_path / "tape", 2, 2) == file.computed()
