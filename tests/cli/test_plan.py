"""What `naiad plan` predicts, beside a simulation, figures that were published, and by hand."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from perf.engine.admission import StepSeconds, simulate
from perf.server.open_loop import Arrival

from helpers.tiny_models import make_tiny_model
from naiad.cli.main import main
from naiad.cli.plan.devices import DEVICES
from naiad.cli.plan.load import Limits, Load, latency, most_per_s
from naiad.cli.plan.steps import Measured, ModelSize, Roofline
from naiad.config import ModelConfig

LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
# Output tokens a second of LLaMA 7B on one GPU, from docs/source/performance.md of TensorRT-LLM 0.5.0: FP8 on
# H100 and L40S, FP16 on A100.
PUBLISHED = [
    ("h100", 8, 64, 128, 128, 9193),
    ("h100", 8, 64, 128, 2048, 5367),
    ("h100", 8, 64, 2048, 128, 2058),
    ("l40s", 8, 64, 128, 128, 3240),
    ("l40s", 8, 64, 128, 2048, 1622),
    ("l40s", 8, 32, 2048, 128, 581),
    ("l40s", 8, 16, 2048, 2048, 531),
    ("a100-80gb", 16, 64, 128, 128, 3486),
    ("a100-80gb", 16, 32, 128, 2048, 1459),
    ("a100-80gb", 16, 32, 2048, 128, 529),
    ("a100-80gb", 16, 16, 2048, 2048, 592),
]


@pytest.mark.parametrize(("gpu", "bits", "batch", "prompt", "output", "published"), PUBLISHED)
def test_published_throughputs_come_out_within_20_percent(
    gpu: str, bits: int, batch: int, prompt: int, output: int, published: float
) -> None:
    """A batch is computed as a whole: all prompts, then all answers."""
    size = ModelSize.of(ModelConfig.from_json(LLAMA_7B, {}), bits, bits)
    roofline = Roofline(size, DEVICES[gpu], bits)
    seconds = batch * roofline.prompt_s(prompt) + output * roofline.decode_s(batch, prompt + output / 2)
    assert 0.8 < batch * output / seconds / published < 1.2


def test_sizes_of_a_7b_model() -> None:
    size = ModelSize.of(ModelConfig.from_json(LLAMA_7B, {}), 16, 16)
    assert size.num_bytes == pytest.approx(13.476e9, rel=1e-3)
    assert size.kv_bytes == 2 * 32 * 4096 * 2


@dataclass(frozen=True)
class Simulated:
    """The costs of the simulation's steps."""

    constant_s: float = 0.004
    prompt_token_s: float = 0.00025
    decode_row_s: float = 0.0006

    def prompt_s(self, num_tokens: float) -> float:
        return num_tokens * self.prompt_token_s

    def decode_s(self, num_sequences: float, context: float) -> float:
        return self.constant_s + num_sequences * self.decode_row_s


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(("prompt", "output"), [(200, 64), (50, 200), (1000, 20)])
def test_the_engines_scheduler_does_what_the_plan_says(share: float, prompt: int, output: int) -> None:
    costs = Simulated()
    most = most_per_s(costs, Load(1.0, prompt, output), 32, Limits())
    draw, now_s = random.Random(5), 0.0
    arrivals: list[Arrival] = []
    while len(arrivals) < 1000:
        now_s += draw.expovariate(share * most)
        arrivals.append(Arrival(now_s, [draw.randrange(1000) for _ in range(prompt)], output))
    steps = StepSeconds(costs.constant_s, costs.prompt_token_s, costs.decode_row_s)
    # No step is cut into chunks, and no slot is missing.
    outcomes = simulate(arrivals, steps, max_num_seqs=256, step_tokens=1 << 16, num_blocks=1 << 14)
    found = latency(costs, Load(share * most, prompt, output), 32)
    assert found is not None
    inter_token_s = sum((each.last_s - each.first_s) / (output - 1) for each in outcomes) / len(outcomes)
    first_token_s = sum(each.first_s for each in outcomes) / len(outcomes)
    assert found.inter_token_s == pytest.approx(inter_token_s, rel=0.25)
    assert found.first_token_s == pytest.approx(first_token_s, rel=0.35)


def test_more_than_a_replica_can_do_is_said() -> None:
    costs = Simulated()
    load = Load(1.0, 1000, 100)
    most = most_per_s(costs, load, 8, Limits())
    assert latency(costs, Load(0.99 * most, 1000, 100), 8) is not None
    assert latency(costs, Load(1.02 * most, 1000, 100), 8) is None
    assert latency(costs, Load(5.0, 1000, 100), 1e9) is None
    assert most_per_s(costs, load, 8, Limits(first_token_s=0.2)) == 0
    assert most_per_s(costs, load, 8, Limits(inter_token_s=0.006)) < most


def test_measured_costs_are_interpolated() -> None:
    measured = Measured([(1, 1.0), (4, 4.0)], 100, 0.001, 0.1, 0.002)
    assert measured.decode_s(0.5, 50) == 1.0
    assert measured.decode_s(2, 100) == 2.0
    assert measured.decode_s(8, 200) == pytest.approx(8.0 + 8 * 100 * 0.001)
    assert measured.prompt_s(10) == pytest.approx(10 * (0.1 + 0.01))


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float | None]:
    assert main(["plan", *words, "--json"]) in (0, 1)
    found: dict[str, float | None] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    words = ["--model", str(tmp_path), "--gpu", "a100-80gb", "--prompt", "1000", "--output", "200"]
    few = plan(capsys, *words, "--rate", "1", "--price-per-hour", "2")
    many = plan(capsys, *words, "--rate", "100", "--price-per-hour", "2")
    assert few["replicas"] == 1
    assert many["replicas"] is not None
    assert many["replicas"] > 5
    assert many["price_per_hour"] == 2 * many["replicas"]
    assert few["price_per_million_output_tokens"] == pytest.approx(2 / (200 * 3600) * 1e6, rel=0.01)
    # (72 − 13.5) GB hold 1,200 tokens of 0.524 MB each so many times.
    assert few["most_sequences"] == 93
    none = plan(capsys, *words, "--rate", "1", "--slo-itl-ms", "1")
    assert none["replicas"] == 0
    assert none["mean_inter_token_ms"] is None


def test_what_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    words = ["plan", "--model", str(tmp_path), "--rate", "1", "--output", "200"]
    assert main([*words, "--gpu", "h100", "--prompt", "4000"]) == 1
    assert "--prompt = 4000: expected at most 4096 tokens together with --output" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B | {"num_hidden_layers": 64}))
    assert main([*words, "--gpu", "l4", "--prompt", "100"]) == 1
    assert "--gpu = 'l4': expected one with more than 29 GB, for the weights alone" in capsys.readouterr().err
    assert main([*words, "--gpu", "h100", "--prompt", "100", "--quantization", "int8"]) == 1
    assert "--quantization = 'int8': expected none with --gpu: --weight-bits says" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--prompt", "100"])
    assert "one of the arguments --gpu --cpu is required" in capsys.readouterr().err


def test_a_plan_for_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(tmp_path, max_position_embeddings=4096)
    words = ["--model", str(tmp_path), "--cpu", "--prompt", "100", "--output", "20", "--dtype", "float32"]
    found = plan(capsys, *words, "--rate", "0.1")
    assert found["replicas"] == 1
    assert found["mean_inter_token_ms"] is not None
    assert found["mean_inter_token_ms"] > 0
    assert found["most_sequences"] == 32
