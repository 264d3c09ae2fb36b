from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams, Sequence

BLOCK = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_runner(directory: Path, **settings: Any) -> ModelRunner:
    values = {"dtype": "float32", "block_size": BLOCK, "max_num_batched_tokens": 512, **settings}
    return ModelRunner(EngineConfig(model_dir=str(directory), **values))


def make_sequences(lengths: list[int], new_tokens: int, num_blocks: int = 200) -> list[Sequence]:
    """Sequences with random prompts and blocks in random order."""
    chance = random.Random(0)
    free = list(range(num_blocks))
    chance.shuffle(free)
    return [
        Sequence(
            sequence_id=index,
            token_ids=[chance.randrange(97) for _ in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(max_tokens=new_tokens),
            arrival_s=0.0,
            block_table=[free.pop() for _ in range(-(-(length + new_tokens) // BLOCK))],
        )
        for index, length in enumerate(lengths)
    ]


def step(runner: ModelRunner, sequences: list[Sequence], chunk: int) -> dict[int, str]:
    """Advance every sequence by at most `chunk` tokens; return the rows' errors."""
    rows = []
    for sequence in sequences:
        count = min(chunk, sequence.num_tokens - sequence.num_computed_tokens)
        start = sequence.num_computed_tokens
        rows.append(SequenceRow(sequence, start, count, start + count == sequence.num_tokens))
    output = runner.run(step_of(rows))
    for row in rows:
        row.sequence.num_computed_tokens += row.num_scheduled_tokens
        row.sequence.token_ids += output.sampled_token_ids.get(row.sequence_id, [])
    return output.errors


def generate(runner: ModelRunner, sequences: list[Sequence], new_tokens: int, chunk: int = 1000) -> None:
    while pending := [s for s in sequences if s.num_output_tokens < new_tokens]:
        assert not step(runner, pending, chunk)


def expected_ids(model: Any, sequence: Sequence, new_tokens: int) -> list[int]:
    prompt = torch.tensor([sequence.token_ids[: sequence.num_prompt_tokens]])
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(ids[0, prompt.shape[1] :].tolist())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    directory = tmp_path_factory.mktemp("llama")
    model = make_tiny_model(directory)
    return make_runner(directory), model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_equal_transformers(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_model(tmp_path, architecture)
    sequences = make_sequences([1, 7, 16, 40], 20)
    generate(make_runner(tmp_path), sequences, 20)
    assert [s.output_token_ids for s in sequences] == [expected_ids(model, s, 20) for s in sequences]


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_logits_equal_transformers(
    tmp_path: Path, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path, **overrides)
    runner = make_runner(tmp_path)
    seen: list[torch.Tensor] = []
    start = runner._sampler.start
    monkeypatch.setattr(
        runner._sampler, "start", lambda logits, *rest: seen.append(logits.clone()) or start(logits, *rest)
    )
    (sequence,) = make_sequences([45], 1)
    step(runner, [sequence], 1000)
    with torch.no_grad():
        expected = model(torch.tensor([sequence.token_ids[:45]])).logits[0, -1:]
    torch.testing.assert_close(seen[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 15, 16, 17, 31, 64])
def test_chunk_size_does_not_change_the_ids(llama: tuple[ModelRunner, Any], chunk: int) -> None:
    runner, model = llama
    sequences = make_sequences([5, 33, 48, 49, 47], 8)
    generate(runner, sequences, 8, chunk)
    assert [s.output_token_ids for s in sequences] == [expected_ids(model, s, 8) for s in sequences]


def test_every_chunk_size_makes_the_same_tokens(llama: tuple[ModelRunner, Any]) -> None:
    runner, model = llama
    (expected,) = make_sequences([70], 4)
    generate(runner, [expected], 4)
    assert expected.output_token_ids == expected_ids(model, expected, 4)
    for chunk in range(1, 65):
        (sequence,) = make_sequences([70], 4)
        generate(runner, [sequence], 4, chunk)
        assert sequence.output_token_ids == expected.output_token_ids, chunk


def test_sequences_may_join_a_running_batch(llama: tuple[ModelRunner, Any]) -> None:
    runner, model = llama
    sequences = make_sequences([9, 30, 17], 12)
    for joined in (1, 2, 3):
        for _ in range(2):
            assert not step(runner, sequences[:joined], 11)
    generate(runner, sequences, 12)
    assert [s.output_token_ids for s in sequences] == [expected_ids(model, s, 12) for s in sequences]


def test_an_empty_step_is_nothing(llama: tuple[ModelRunner, Any]) -> None:
    output = llama[0].run(StepBatch())
    assert (output.sampled_token_ids, output.errors) == ({}, {})


def poison(runner: ModelRunner, sequence: Sequence) -> None:
    """Fill everything the sequence has cached with NaN."""
    with torch.inference_mode():
        for layer in runner._pool.layers:
            layer.key[sequence.block_table] = torch.nan
            layer.value[sequence.block_table] = torch.nan


# 1000: all rows decode; 16: the poisoned row is in its prompt and not sampled from.
@pytest.mark.parametrize("chunk", [1000, 16])
def test_a_poisoned_sequence_fails_alone(llama: tuple[ModelRunner, Any], chunk: int) -> None:
    runner, model = llama
    sequences = make_sequences([20, 44, 9], 6)
    step(runner, sequences, chunk)
    bad = sequences[1]
    poison(runner, bad)
    errors = step(runner, sequences, chunk)
    assert list(errors) == [bad.sequence_id]
    runner.clear_blocks([bad.block_table])
    others = [sequences[0], sequences[2]]
    generate(runner, others, 6)
    assert [s.output_token_ids for s in others] == [expected_ids(model, s, 6) for s in others]


def test_blocks_of_a_poisoned_sequence_can_be_used_again(llama: tuple[ModelRunner, Any]) -> None:
    runner, model = llama
    (first,) = make_sequences([20], 6)
    poison(runner, first)
    runner.clear_blocks([first.block_table])
    generate(runner, [first], 6)
    assert first.output_token_ids == expected_ids(model, first, 6)


def test_a_sharded_checkpoint_computes_the_same(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, max_shard_size="30KB")
    sequences = make_sequences([12], 6)
    generate(make_runner(tmp_path), sequences, 6)
    assert sequences[0].output_token_ids == expected_ids(model, sequences[0], 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_16_bits_computes_the_same_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    make_tiny_model(tmp_path).to(dtype).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sequences = make_sequences([12, 30], 6)
    generate(make_runner(tmp_path, dtype="float32"), sequences, 6)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_ids(model, sequence, 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_are_close(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked as a mean, because the deviation of a single prompt is random and differs between CPUs."""
    model = make_tiny_model(tmp_path)
    runner = make_runner(tmp_path, dtype=dtype)
    seen: list[torch.Tensor] = []
    start = runner._sampler.start
    monkeypatch.setattr(
        runner._sampler, "start", lambda logits, *rest: seen.append(logits.clone()) or start(logits, *rest)
    )
    sequences = make_sequences([30] * 16, 1)
    step(runner, sequences, 1000)
    with torch.no_grad():
        expected = model(torch.tensor([sequence.token_ids[:30] for sequence in sequences])).logits[:, -1]
    assert torch.nn.functional.cosine_similarity(seen[0], expected).mean().item() > 0.999


def test_the_token_budget_is_measured_when_none_is_set(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    runner = make_runner(tmp_path, max_num_batched_tokens=0)
    assert 32 <= runner.token_budget.num_tokens <= 2048
    assert runner.token_budget.num_tokens % 16 == 0
    assert runner.token_budget.context_cost >= 0


@pytest.mark.parametrize(
    ("setting", "expected", "told"),
    [(0, 256, ""), (100, 100, ""), (5000, 256, "max_model_len = 5000: the checkpoint has no more")],
)
def test_max_model_len_is_the_smallest_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: int, expected: int, told: str
) -> None:
    make_tiny_model(tmp_path)
    assert make_runner(tmp_path, max_model_len=setting).max_model_len == expected
    assert told in caplog.text
    assert bool(told) == ("fewer than" in caplog.text)


@pytest.mark.parametrize(("setting", "asked"), [(0, "the checkpoint's 256"), (200, "max_model_len = 200")])
def test_max_model_len_is_never_more_than_the_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: int, asked: str
) -> None:
    make_tiny_model(tmp_path)
    block_bytes = 2 * 3 * 2 * 10 * BLOCK * 4
    runner = make_runner(tmp_path, kv_cache_bytes=block_bytes * 3, max_model_len=setting)
    assert (runner.num_blocks, runner.max_model_len) == (3, 3 * BLOCK)
    assert f"at most {3 * BLOCK} tokens, fewer than {asked}: the KV cache holds no more" in caplog.text


def test_a_pool_without_a_block_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        make_runner(tmp_path, kv_cache_bytes=1)


def test_cuda_without_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device = 'cuda'"):
        make_runner(tmp_path, device="cuda")


def test_memory_is_that_of_the_process(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    runner = make_runner(tmp_path, kv_cache_bytes=4_000_000)
    before = runner.memory_use()
    # So much that it cannot come from memory which was freed before.
    held = torch.ones(128 << 20, dtype=torch.uint8)
    after = runner.memory_use()
    assert after.cpu_bytes - before.cpu_bytes > len(held) // 2
    assert (after.gpu_bytes, after.pinned_bytes) == (0, 0)


def test_native_codes_of_the_kv_cache_give_torchs_logits(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    prompt = [5 * place % 96 for place in range(40)]
    made = {}
    for kernels in ("native", "torch"):
        for kind in ("auto", "int8"):
            runner = make_runner(tmp_path, cpu_kernels=kernels, kv_cache_dtype=kind)
            output = runner.run(lone_step([LoneRow(0, prompt, 0, [0, 1, 2], params)]))
            made[kernels, kind] = torch.frombuffer(bytearray(output.context_logits[0]), dtype=torch.float32)

    def apart(one: tuple[str, str], other: tuple[str, str]) -> float:
        return float((made[one] - made[other]).square().mean().sqrt())

    rounding = apart(("torch", "int8"), ("torch", "auto"))
    assert rounding > 100 * apart(("native", "auto"), ("torch", "auto"))
    assert apart(("native", "int8"), ("torch", "int8")) < 0.1 * rounding


class FullMemory:
    """Stands in front of a method of the model: some calls find the device's memory full."""

    def __init__(self, method: Any, full_at: set[int]) -> None:
        self._method = method
        self._full_at = full_at
        self.num_calls = 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in self._full_at:
            # A part of the step has been written by then.
            self._method(*args)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._method(*args)


@pytest.mark.parametrize("name", ["forward", "logits"])
def test_a_step_that_finds_the_memory_full_is_computed_once_more(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path)
    runner = make_runner(tmp_path, cpu_kernels="torch")
    full = FullMemory(getattr(runner._model, name), {1, 4, 9})
    monkeypatch.setattr(runner._model, name, full)
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    sequences = make_sequences([5, 40], 12)
    generate(runner, sequences, 12, chunk=16)
    assert [s.output_token_ids for s in sequences] == [expected_ids(model, s, 12) for s in sequences]
    assert len(emptied) == 3


def test_a_memory_that_stays_full_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path)
    runner = make_runner(tmp_path, cpu_kernels="torch")
    full = FullMemory(runner._model.forward, {1, 2})
    monkeypatch.setattr(runner._model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        generate(runner, make_sequences([5], 2), 2)
    assert full.num_calls == 2
