from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from perf.peers.adapter_process import AdapterProcess, Served
from perf.peers.bench import chosen, chosen_kinds, chosen_shapes
from perf.peers.bounds import Bounds, Need
from perf.peers.contestants import Contestant, formats, naiad, peers
from perf.peers.shapes import LONG, QUICK, Shape, kv_tokens, need, weight_bytes
from perf.peers.summary import Turn, agreement, spread, summarize, tokens_per_s
from perf.server.open_loop import Arrival

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


def test_requests_are_served_when_they_are_due(adapter: AdapterProcess) -> None:
    load(adapter)
    made = adapter.serve([Arrival(0.0, [1, 2], 3), Arrival(0.0, [3], 1), Arrival(0.2, [4], 2)])
    assert made.num_tokens == [3, 1, 2]
    assert all(0 <= first <= last for first, last in zip(made.first_s, made.last_s, strict=True))
    # The request of one token ends with its first.
    assert made.first_s[1] == made.last_s[1]
    # Numbers are new in the next pass.
    assert adapter.serve([Arrival(0.0, [1], 2)]).num_tokens == [2]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("serve", "MemoryError"), ("stuck", "makes no more tokens"), ("no requests", "'serve' is not")],
)
def test_an_adapter_that_fails_to_serve_says_why(adapter: AdapterProcess, fault: str, reason: str) -> None:
    load(adapter, fault=fault)
    with pytest.raises(InternalError, match=f"ended with 1 at serve: .*{reason}"):
        adapter.serve([Arrival(0.0, [1], 2)])


@pytest.mark.parametrize("fault", ["", "no requests"])
def test_steps_in_which_all_sequences_generate_are_timed(adapter: AdapterProcess, fault: str) -> None:
    load(adapter, fault=fault)
    made = adapter.decode([[1, 2], [5, 6]], 4)
    # The first step brings the first tokens.
    assert made.num_tokens == 2 * 3
    assert made.first_s >= 0
    assert made.seconds >= 0


def test_steps_without_a_sequence_that_has_ended_do_not_count(adapter: AdapterProcess) -> None:
    load(adapter, fault="one by one")
    made = adapter.decode([[1, 2], [5, 6]], 2)
    assert (made.num_tokens, made.seconds) == (0, 0)
    assert adapter.decode([[1, 2]], 2).num_tokens == 1


def test_times_between_tokens_leave_out_requests_of_one_token() -> None:
    assert Served([1.0, 1.0], [1.0, 2.0], [1, 3]).inter_token_s == [0.5]
    assert Served([1.0], [1.0], [1]).inter_token_s == [0.0]


def test_a_paused_adapter_is_ended(adapter: AdapterProcess) -> None:
    load(adapter)
    adapter.pause()
    adapter.close()
    with pytest.raises(psutil.NoSuchProcess):
        adapter.peak_bytes()


def test_decode_counts_after_the_first_tokens_and_prefill_until_them() -> None:
    assert tokens_per_s(DECODE, turn(1.0, 5.0)) == 8 * 128 / 4
    assert tokens_per_s(PREFILL, turn(0.5, 0.0)) == 2 * 256 / 0.5


def test_spread_is_the_range_over_the_median() -> None:
    assert spread([10.0, 12.0, 9.0]) == pytest.approx(0.3)


def contestant(name: str, environment: str = "peer", group: str = "16-bit") -> Contestant:
    return Contestant(name, environment, "fake", "checkpoint", group, 2, 2, {})


def turn(first_s: float, total_s: float, bytes_per_s: float = 1.0, operations_per_s: float = 1.0) -> Turn:
    return Turn(first_s, total_s, Bounds(bytes_per_s, operations_per_s))


def test_rows_have_medians_and_ratios_to_the_groups_best_peer() -> None:
    who = [
        contestant("ours", ""),
        contestant("slow"),
        contestant("fast"),
        contestant("small", group="8-bit"),
        contestant("failed"),
    ]
    seconds = {"ours": (2, 4, 2), "slow": (8, 8, 8), "fast": (4, 4, 8), "small": (1, 1, 1)}
    by_name = {name: [turn(1.0, 1.0 + each) for each in times] for name, times in seconds.items()}
    needs = {(each.name, DECODE): Need(1, 1) for each in who}
    rows = {row["contestant"]: row for row in summarize({DECODE: by_name}, who, needs)}
    assert list(rows) == ["ours", "slow", "fast", "small"]
    assert rows["ours"]["tokens_per_s"] == 512
    assert rows["ours"]["best_peer"] == "fast"
    # The median of the rounds' ratios 2, 1 and 4, not the ratio of medians.
    assert rows["ours"]["of_best_peer"] == 2
    assert rows["slow"]["of_best_peer"] == 0.5
    assert (rows["small"]["best_peer"], rows["small"]["of_best_peer"]) == ("small", 1)


def test_shares_are_medians_of_the_rounds_shares_by_the_bounds_of_each_round() -> None:
    # 128 steps in 128 s, each of 100 bytes and 300 operations. Medians of all bounds would give 0.5 and 0.3.
    made = [turn(1, 129, 200, 1000), turn(1, 129, 125, 400), turn(1, 257, 400, 1000)]
    needs = {("ours", DECODE): Need(100, 300)}
    (row,) = summarize({DECODE: {"ours": made}}, [contestant("ours", "")], needs)
    # The rounds' shares are 0.5, 0.8, 0.125 of memory and 0.3, 0.75, 0.15 of compute.
    assert (row["of_memory_bound"], row["of_compute_bound"]) == (0.5, 0.3)
    made[2] = turn(1, 129, 100, 500)
    (row,) = summarize({DECODE: {"ours": made}}, [contestant("ours", "")], needs)
    assert (row["of_memory_bound"], row["of_compute_bound"]) == (0.8, 0.6)


def test_without_a_peer_there_is_no_ratio_and_a_prefill_is_one_unit() -> None:
    needs = {("ours", PREFILL): Need(10, 40)}
    (row,) = summarize({PREFILL: {"ours": [turn(0.5, 0, 100, 100)]}}, [contestant("ours", "")], needs)
    assert (row["best_peer"], row["of_best_peer"]) == ("", None)
    assert (row["of_memory_bound"], row["of_compute_bound"]) == (0.2, 0.8)


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


@pytest.mark.parametrize("flags", [set(), {"amx_tile"}], ids=["vectors", "amx"])
def test_each_format_has_naiad_and_a_peer_that_load_the_same(flags: set[str]) -> None:
    who = formats(flags)
    assert len({each.name for each in who}) == len(who)
    groups = {each.group for each in who}
    assert {"Q4_0", "Q8_0", "compressed-tensors W4A16"} <= groups
    for group in groups:
        mine = [each for each in who if each.group == group]
        assert {each.is_peer for each in mine} == {True, False}
        assert len({each.model_format for each in mine}) == 1
    # Its buffers for AMX have crashed.
    assert any(each.options.get("extra_buffers") for each in who) == (not flags)


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


def test_contestants_are_chosen_by_their_names_or_beginnings_of_them() -> None:
    who = [naiad("bf16:dtype=bfloat16"), *peers(())]
    assert chosen(who, "") == who
    assert [each.name for each in chosen(who, "vllm,naiad")] == ["naiad bf16", "vllm eager", "vllm compiled"]
    assert [each.name for each in chosen(who, "openvino int8")] == ["openvino int8"]
    with pytest.raises(StartupError, match="--contestants sglang: nobody has that name"):
        chosen(who, "sglang")


def test_the_cache_holds_the_largest_shape_with_each_sequence_rounded_up() -> None:
    assert kv_tokens(QUICK) == 32 * 256
    assert kv_tokens([Shape("context", 3, 1000, 64)]) == 3 * 1280


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    shape = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5},
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e4},
        **{"max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return ModelConfig.from_directory(str(tmp_path))


# Each layer: queries and output 64 × 64, keys and values 64 × 32, three of 64 × 128.
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
HEAD = 100 * 64


def test_a_step_reads_all_weights_and_the_cache(config: ModelConfig) -> None:
    each = contestant("any")
    assert weight_bytes(config, each) == 2 * (LAYERS + HEAD)
    step = need(config, each, Shape("decode", 3, 10, 20))
    # A token's keys and values: two layers of two heads of 16, two bytes each.
    assert step.num_bytes == 2 * (LAYERS + HEAD) + 3 * 20 * 2 * 2 * 2 * 16 * 2
    # Each query is multiplied with a key and a value of each of 20 tokens, in two layers of four heads of 16.
    assert step.operations == 2 * 3 * (LAYERS + HEAD + 20 * 2 * 2 * 4 * 16)


def test_a_head_may_have_other_bits_than_the_layers(config: ModelConfig) -> None:
    small = next(each for each in formats(set()) if each.name == "naiad w4")
    assert weight_bytes(config, small) == int(LAYERS * 4.75 / 8 + HEAD)


def test_a_prefill_computes_every_token_and_the_head_once(config: ModelConfig) -> None:
    whole = need(config, contestant("any"), Shape("prefill", 2, 3, 1))
    # Queries attend to 1, 2 and 3 tokens.
    assert whole.operations == 2 * 2 * (3 * LAYERS + HEAD + (1 + 2 + 3) * 2 * 2 * 4 * 16)


def test_products_are_as_wide_as_the_contestants_numbers() -> None:
    bits = {each.name: each.product_bits for each in (naiad("f32:dtype=float32"), *peers(()))}
    assert (bits["naiad f32"], bits["vllm eager"], bits["llama.cpp q8_0"]) == (32, 16, 8)
    assert naiad("int8:dtype=float32,quantization=int8").product_bits == 8


def test_a_quick_run_has_all_kinds_but_long_contexts() -> None:
    assert chosen_kinds("", is_quick=False) == ["decode", "prefill", "context", "trace"]
    assert chosen_kinds("", is_quick=True) == ["decode", "prefill", "trace"]
    assert chosen_kinds("context, trace", is_quick=False) == ["context", "trace"]
    with pytest.raises(StartupError, match="--kinds context: expected some of decode, prefill, trace"):
        chosen_kinds("context", is_quick=True)


def test_shapes_of_other_batch_sizes_are_left_out() -> None:
    assert chosen_shapes(QUICK, ["decode"], ()) == [each for each in QUICK if each.kind == "decode"]
    assert [each.name for each in chosen_shapes(LONG, ["context"], [8, 1])] == [
        "context 1 × 1000+280",
        "context 1 × 4000+352",
        "context 8 × 4000+352",
    ]
    with pytest.raises(StartupError, match=r"--batch-sizes 16: expected some of 1, 8, 32"):
        chosen_shapes(LONG, ["context"], [8, 16])
    with pytest.raises(StartupError, match="--batch-sizes 8: expected none with these kinds of work"):
        chosen_shapes(LONG, ["trace"], [8])
