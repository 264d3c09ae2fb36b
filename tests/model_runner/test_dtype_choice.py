"""The dtype that `auto` stands for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from naiad.config import EngineConfig
from naiad.model_runner.device import resolve_dtype
from naiad_kernels.linear.onednn import computes_in_bfloat16

CPU = torch.device("cpu")
PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    computes_in_bfloat16.cache_clear()
    yield
    computes_in_bfloat16.cache_clear()


def probe(monkeypatch: pytest.MonkeyPatch, *answers: bool) -> None:
    """What torch says of the CPU: whether it has avx512_bf16, and whether it has AMX."""
    for name, answer in zip(PROBES, answers, strict=True):
        monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("has_avx512_bf16", "has_amx", "expected"),
    [
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (True, True, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it_and_never_fewer_bits(
    monkeypatch: pytest.MonkeyPatch, has_avx512_bf16: bool, has_amx: bool, expected: torch.dtype
) -> None:
    probe(monkeypatch, has_avx512_bf16, has_amx)
    config = EngineConfig(model_dir="m")
    assert (config.dtype, resolve_dtype(config, CPU)) == ("auto", expected)
    assert (config.quantization, config.kv_cache_dtype) == ("none", "auto")


def test_a_torch_without_the_probes_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROBES:
        monkeypatch.delattr(torch.cpu, name)
    assert resolve_dtype(EngineConfig(model_dir="m"), CPU) == torch.float32


def test_auto_is_bfloat16_on_a_gpu_whatever_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, False, False)
    assert resolve_dtype(EngineConfig(model_dir="m", device="cuda"), torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_that_is_named_is_not_probed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_bfloat16: bool
) -> None:
    probe(monkeypatch, has_bfloat16, has_bfloat16)
    config = EngineConfig(model_dir="m", dtype=str(dtype).removeprefix("torch."))
    assert resolve_dtype(config, CPU) == dtype
