from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from perf.peers.adapter_process import AdapterProcess
from perf.peers.bench import chosen
from perf.peers.contestants import Contestant, naiad, peers
from perf.peers.shapes import QUICK, Shape, kv_tokens, step_bytes, weight_bytes
from perf.peers.summary import Turn, agreement, spread, summarize, tokens_per_s

from naiad.config import ModelConfig
from naiad.errors import InternalError, StartupError

FAKE = Path(__file__).with_name("fake_adapter.py")
DECODE = Shape("decode", 8, 128, 129)
PREFILL = Shape("prefill", 2, 256, 1)


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[AdapterProcess]:
    process = AdapterProcess([sys.executable, str(FAKE)], os.environ, tmp_path / "log")
    yield process
    process.close()


def load(adapter: AdapterProcess, **options: str) -> dict[str, str]:
    return adapter.load(
        model="model", threads=1, max_batch=2, max_length=8, kv_tokens=16, options={**options}
    )


def test_an_adapter_loads_runs_and_reports_versions_and_memory(adapter: AdapterProcess) -> None:
    assert load(adapter) == {"pytest": pytest.__version__}
    made = adapter.run([[1, 2], [5, 6]], 3)
    assert made.tokens == [[3, 4, 5], [7, 8, 9]]
    assert made.seconds >= 0
    assert adapter.peak_bytes() > 1 << 20
    assert 1 << 20 < adapter.share_bytes() <= adapter.peak_bytes()


def test_a_paused_adapter_goes_on(adapter: AdapterProcess) -> None:
    load(adapter)
    adapter.pause()
    adapter.resume()
    assert adapter.run([[1]], 1).tokens == [[2]]


def test_an_adapter_that_fails_to_load_says_why(adapter: AdapterProcess) -> None:
    with pytest.raises(InternalError, match=r"ended with 1 at load: .*OSError: model is not here"):
        load(adapter, fault="load")


def test_an_adapter_that_fails_to_run_says_why(adapter: AdapterProcess) -> None:
    load(adapter, fault="run")
    with pytest.raises(InternalError, match=r"ended with 1 at run: .*MemoryError: no room for the cache"):
        adapter.run([[1]], 1)


def test_a_missing_token_is_an_error(adapter: AdapterProcess) -> None:
    load(adapter, fault="short")
    with pytest.raises(InternalError, match=r"\[3, 3\] tokens instead of 4 for each of 2"):
        adapter.run([[1], [2]], 4)


def test_a_paused_adapter_is_ended(adapter: AdapterProcess) -> None:
    load(adapter)
    adapter.pause()
    adapter.close()
    with pytest.raises(psutil.NoSuchProcess):
        adapter.peak_bytes()


def test_decode_counts_after_the_first_tokens_and_prefill_until_them() -> None:
    assert tokens_per_s(DECODE, Turn(1.0, 5.0)) == 8 * 128 / 4
    assert tokens_per_s(PREFILL, Turn(0.5)) == 2 * 256 / 0.5


def test_spread_is_the_range_over_the_median() -> None:
    assert spread([10.0, 12.0, 9.0]) == pytest.approx(0.3)


def contestant(name: str, environment: str = "peer", group: str = "16-bit") -> Contestant:
    return Contestant(name, environment, "fake", "checkpoint", group, 2, 2, {})


def test_rows_have_medians_ratios_to_the_groups_best_peer_and_shares_of_the_bound() -> None:
    who = [
        contestant("ours", ""),
        contestant("slow"),
        contestant("fast"),
        contestant("small", group="8-bit"),
        contestant("failed"),
    ]
    seconds = {"ours": (2, 4, 2), "slow": (8, 8, 8), "fast": (4, 4, 8), "small": (1, 1, 1)}
    by_name = {name: [Turn(1.0, 1.0 + each) for each in times] for name, times in seconds.items()}
    # The bound is 10 ms a step; ours takes 2 s for 128 of them.
    rows = {row["contestant"]: row for row in summarize({DECODE: by_name}, who, {("ours", DECODE): 0.01})}
    assert list(rows) == ["ours", "slow", "fast", "small"]
    assert rows["ours"]["tokens_per_s"] == 512
    assert rows["ours"]["best_peer"] == "fast"
    # The median of the rounds' ratios 2, 1 and 4, not the ratio of medians.
    assert rows["ours"]["of_best_peer"] == 2
    assert rows["ours"]["of_memory_bound"] == 0.64
    assert rows["slow"]["of_best_peer"] == 0.5
    assert rows["slow"]["of_memory_bound"] is None
    assert (rows["small"]["best_peer"], rows["small"]["of_best_peer"]) == ("small", 1)


def test_without_a_peer_there_is_no_ratio() -> None:
    (row,) = summarize({PREFILL: {"ours": [Turn(0.5)]}}, [contestant("ours", "")], {("ours", PREFILL): 1.0})
    assert (row["best_peer"], row["of_best_peer"], row["of_memory_bound"]) == ("", None, None)


def test_agreement_ends_at_the_first_other_token() -> None:
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert agreement(expected, expected) == 1
    assert agreement([[1, 2, 0, 4], [0, 6, 7, 8]], expected) == 0.25


def test_a_contestant_of_naiad_has_fields_of_the_engines_configuration() -> None:
    plain = naiad("f32:dtype=float32,block_size=32,cuda_graphs=false")
    assert plain.options == {"dtype": "float32", "block_size": 32, "cuda_graphs": False}
    assert (plain.name, plain.group, plain.weight_bytes, plain.kv_bytes) == ("naiad f32", "16-bit", 2, 4)
    assert not plain.is_peer
    small = naiad("int8:dtype=bfloat16,quantization=int8")
    assert (small.group, small.weight_bytes, small.kv_bytes) == ("8-bit", 1, 2)


@pytest.mark.parametrize("text", [":dtype=bfloat16", "x:dtype", "x:=bfloat16"])
def test_a_contestant_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="expected NAME:field=value"):
        naiad(text)


def test_llama_cpp_uses_no_amx_buffers_and_openvino_no_bfloat16_that_the_cpu_lacks() -> None:
    def options(*flags: str) -> dict[str, object]:
        by_name = {each.name: each.options for each in peers(flags)}
        return {
            "extra": by_name["llama.cpp q8_0"]["extra_buffers"],
            "precision": by_name["openvino int8"]["precision"],
            "kv": by_name["openvino int8"]["kv"],
        }

    assert options("avx2") == {"extra": True, "precision": "f32", "kv": "f16"}
    assert options("avx512_bf16") == {"extra": True, "precision": "bf16", "kv": "bf16"}
    assert options("avx512_bf16", "amx_tile") == {"extra": False, "precision": "bf16", "kv": "bf16"}


def test_contestants_are_chosen_by_the_beginning_of_their_names() -> None:
    who = [naiad("bf16:dtype=bfloat16"), *peers(())]
    assert chosen(who, "") == who
    assert [each.name for each in chosen(who, "vllm,naiad")] == ["naiad bf16", "vllm eager", "vllm compiled"]
    with pytest.raises(StartupError, match="--contestants sglang: nobody has that name"):
        chosen(who, "sglang")


def test_the_cache_holds_the_largest_shape_with_each_sequence_rounded_up() -> None:
    assert kv_tokens(QUICK) == 32 * 256
    assert kv_tokens([Shape("context", 3, 1000, 64)]) == 3 * 1280


def test_a_step_reads_all_weights_and_the_cache(tmp_path: Path) -> None:
    shape = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5},
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e4},
        **{"max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = ModelConfig.from_directory(str(tmp_path))
    # Each layer: queries and output 64 × 64, keys and values 64 × 32, three of 64 × 128.
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 100 * 64
    each = contestant("any")
    assert weight_bytes(config, each) == 2 * weights
    # A token's keys and values: two layers of two heads of 16, two bytes each.
    assert step_bytes(config, each, Shape("decode", 3, 10, 20)) == 2 * weights + 3 * 20 * 2 * 2 * 2 * 16 * 2
