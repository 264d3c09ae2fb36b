from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from perf.engine.device_wait import device_spans, idle_share
from perf.engine.random_checkpoint import LLAMA_3_8B, TINY, write_random_checkpoint
from perf.engine.whole_model import RANDOM_8B, REHEARSAL, measure_model, step_bytes, verdict
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from naiad.cli.bench.throughput import Work
from naiad.config import ModelConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), TINY, "float32", "cpu")


def test_a_tiny_model_is_measured_beside_transformers(checkpoint: Path) -> None:
    args = argparse.Namespace(**REHEARSAL, rehearse=True, block_size=16)
    rows = measure_model("tiny", checkpoint, args, bytes_per_s=1e9)
    assert [(row["batch"], row["contestant"]) for row in rows] == [
        (batch, contestant) for batch in (1, 3) for contestant in ("engine", "generate", "generate_batch")
    ]
    for row in rows:
        assert row["first_token_s"] > 0
        # They are times of two passes, and the first may have been the slower one.
        decode_s = max(row["total_s"] - row["first_token_s"], 1e-6)
        assert row["step_ms"] == pytest.approx(1e3 * decode_s / 23, rel=0.01)
        assert row["of_bound"] > 0
        assert (row["device_waits"], row["target"]) == (None, "")
    assert [rows[0]["same_prompts"], rows[3]["same_prompts"]] == [1, 3]


def test_a_step_reads_every_weight_once_and_every_cached_token(tmp_path: Path) -> None:
    shape = LLAMA_3_8B | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    config = ModelConfig.from_directory(str(tmp_path))
    one = step_bytes(config, Work(1, prompt_tokens=0, output_tokens=0), "bfloat16")
    # 6.98 billion weights in layers, 0.53 billion in the head, two bytes each.
    assert one == pytest.approx(15.01e9, rel=0.001)
    more = step_bytes(config, Work(3, prompt_tokens=100, output_tokens=20), "bfloat16")
    assert more - one == 3 * 110 * 131_072
    nothing_cached = Work(1, prompt_tokens=0, output_tokens=0)
    assert step_bytes(config, nothing_cached, "bfloat16", "fp8") == one // 2
    assert step_bytes(config, nothing_cached, "bfloat16", "int4") == pytest.approx(4.89e9, rel=0.001)


def row(model: str, batch: int, of_bound: float, output_tokens_per_s: float) -> dict[str, object]:
    return {
        "model": model,
        "batch": batch,
        "of_bound": of_bound,
        "output_tokens_per_s": output_tokens_per_s,
    }


@pytest.mark.parametrize(
    ("model", "batch", "of_bound", "ratio", "expected"),
    [
        (RANDOM_8B, 1, 0.86, 1.0, "met: of_bound ≥ 0.85"),
        (RANDOM_8B, 1, 0.84, 9.0, "missed: of_bound ≥ 0.85"),
        (RANDOM_8B, 256, 0.1, 3.5, "met: 3.50 × generate_batch, ≥ 3"),
        ("default", 256, 0.9, 2.5, "missed: 2.50 × generate_batch, ≥ 3"),
        ("default", 1, 0.1, 1.0, ""),
        (RANDOM_8B, 32, 0.1, 1.0, ""),
    ],
)
def test_what_was_asked_for_is_met_or_missed(
    model: str, batch: int, of_bound: float, ratio: float, expected: str
) -> None:
    rows = [row(model, batch, of_bound, 10 * ratio), row(model, batch, 0.0, 1.0), row(model, batch, 0.0, 10)]
    assert verdict(rows) == expected


def test_a_device_waits_where_no_span_is() -> None:
    assert idle_share([]) is None
    assert idle_share([(5.0, 9.0)]) == 0.0
    assert idle_share([(0.0, 10.0), (2.0, 4.0), (6.0, 20.0)]) == 0.0
    assert idle_share([(12.0, 20.0), (0.0, 4.0), (3.0, 6.0)]) == pytest.approx(0.3)


def test_the_gpus_events_of_a_profile_are_found() -> None:
    def event(device: int, start: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=start + 1.0)
        return SimpleNamespace(device_type=DeviceType(device), time_range=span)

    cpu, cuda = DeviceType.CPU.value, DeviceType.CUDA.value
    assert device_spans([event(cpu, 0.0), event(cuda, 3.0), event(cuda, 7.0)]) == [(3.0, 4.0), (7.0, 8.0)]
