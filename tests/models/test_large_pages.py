"""Weights in large pages: the same numbers in memory of the process's own, as long as there is enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner import ModelRunner, model_runner
from naiad.models import load_model
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.large_pages import LargePages, has_large_pages
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.panels import NativeWeight

OPTIONS = LoadOptions(torch.bfloat16, native=True)
GIB = 1 << 30


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


def mapped_from(tensor: torch.Tensor) -> str:
    """The file that a tensor is mapped from; empty: memory of the process's own."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)", line)
        assert match is not None, line
        if int(match[1], 16) <= address < int(match[2], 16):
            return match[3]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def head(model_dir: Path, pages: LargePages | None, *, keeps: bool = True) -> NativeWeight:
    cache = CheckpointCache(model_dir) if keeps else None
    model = load_model(str(model_dir), ModelConfig.from_directory(model_dir), OPTIONS, cache, pages)
    weight = vars(model)["_lm_head"]
    assert isinstance(weight, NativeWeight)
    return weight


def test_what_is_kept_is_equal_and_aligned() -> None:
    pages = LargePages(lambda: 64 * GIB)
    tensors = [torch.randn(3, 5), torch.randn(1, 7).bfloat16(), torch.arange(9, dtype=torch.uint8)]
    copies = [pages.keep(each) for each in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.data_ptr() % 64 == 0
        assert copy.data_ptr() != tensor.data_ptr()
    assert len({each.data_ptr() for each in copies}) == len(copies)


def test_a_tensor_larger_than_a_piece_gets_one_of_its_own() -> None:
    pages = LargePages(lambda: 64 * GIB)
    large = torch.ones((65 << 20) + 3, dtype=torch.uint8)
    small = torch.ones(5)
    assert torch.equal(pages.keep(large), large)
    assert torch.equal(pages.keep(small), small)


def test_nothing_is_copied_where_memory_is_short() -> None:
    pages = LargePages(lambda: GIB // 2)
    tensor = torch.randn(3)
    assert pages.keep(tensor) is tensor


def test_no_more_is_copied_once_memory_is_short() -> None:
    available = [2 * GIB, GIB // 2, 2 * GIB]
    pages = LargePages(lambda: available.pop(0))
    tensors = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(3)]
    copied = [pages.keep(each) is not each for each in tensors]
    assert copied == [True, False, False]


@pytest.mark.parametrize("keeps", [True, False], ids=["kept for the next start", "not kept"])
def test_panels_are_copied_at_every_start(model_dir: Path, keeps: bool) -> None:
    plain = head(model_dir, None, keeps=False)
    for _ in range(2):
        weight = head(model_dir, LargePages(lambda: 64 * GIB), keeps=keeps)
        assert mapped_from(weight.panels) == ""
        assert torch.equal(weight.panels, plain.panels)


def test_without_large_pages_panels_are_mapped_from_the_start_cache(model_dir: Path) -> None:
    head(model_dir, None)
    assert mapped_from(head(model_dir, None).panels).endswith(".weights")


@pytest.mark.parametrize(
    ("wanted", "setting", "expected"),
    [(True, "always [madvise] never", 1), (True, "always madvise [never]", 0), (False, "[always]", 0)],
)
def test_the_engine_copies_if_it_may_and_can(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wanted: bool,
    setting: str,
    expected: int,
) -> None:
    file = tmp_path / "enabled"
    file.write_text(setting)
    made = []

    class Counted(LargePages):
        def __init__(self) -> None:
            made.append(self)
            super().__init__()

    monkeypatch.setattr(model_runner, "has_large_pages", lambda: has_large_pages(file))
    monkeypatch.setattr(model_runner, "LargePages", Counted)
    ModelRunner(EngineConfig(model_dir=str(model_dir), large_pages=wanted, kv_cache_bytes=1 << 20))
    is_native = True
    assert len(made) == expected * is_native


def test_a_system_without_large_pages_has_none(tmp_path: Path) -> None:
    assert not has_large_pages(tmp_path / "enabled")
