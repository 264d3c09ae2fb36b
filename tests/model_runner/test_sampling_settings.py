from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.outputs import ModelOutput
from naiad.sequence import SamplingParams, Sequence

BLOCK = 16
NEW_TOKENS = 16
STOP_IDS = [5, 40]
PROMPTS = [[3, 9, 27, 81], [1] * 20, list(range(50, 83)), [7]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    directory = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(directory)
    config = EngineConfig(
        model_dir=str(directory), dtype="float32", block_size=BLOCK, max_num_batched_tokens=512
    )
    return ModelRunner(config), model


def make_sequence(sequence_id: int, prompt: list[int], **params: Any) -> Sequence:
    return Sequence(
        sequence_id=sequence_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(**{"max_tokens": NEW_TOKENS, **params}),
        arrival_s=0.0,
        block_table=list(range(sequence_id * 8, sequence_id * 8 + 8)),
    )


def step(runner: ModelRunner, sequences: list[Sequence], chunk: int) -> ModelOutput:
    """Advance every sequence by at most `chunk` tokens."""
    rows = []
    for sequence in sequences:
        start = sequence.num_computed_tokens
        count = min(chunk, sequence.num_tokens - start)
        rows.append(SequenceRow(sequence, start, count, start + count == sequence.num_tokens))
    output = runner.run(step_of(rows))
    for row in rows:
        row.sequence.num_computed_tokens += row.num_scheduled_tokens
        if row.sequence_id in output.sampled_token_ids:
            row.sequence.token_ids += output.sampled_token_ids[row.sequence_id]
    return output


# Our parameters, and the equivalent ones for transformers' `generate`.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "repetition": ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
    "bias": (
        {"logit_bias": ((8, 30.0), (9, 29.5), (10, -30.0))},
        {"sequence_bias": {(8,): 30.0, (9,): 29.5, (10,): -30.0}},
    ),
    "min_tokens": (
        {"min_tokens": 12, "stop_token_ids": tuple(STOP_IDS), "logit_bias": ((5, 90.0), (40, 91.0))},
        {"min_new_tokens": 12, "sequence_bias": {(5,): 90.0, (40,): 91.0}},
    ),
    "allowed": (
        {"allowed_token_ids": (3, 20, 21, 33, 90)},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 20, 21, 33, 90]},
    ),
}


def bad_words_of(runner: ModelRunner, prompt: list[int]) -> list[list[int]]:
    """Words of one, two and three ids that the model would generate, and one that starts in the prompt."""
    sequence = make_sequence(0, prompt)
    while sequence.num_output_tokens < NEW_TOKENS:
        step(runner, [sequence], 512)
    output = sequence.output_token_ids
    words = [[prompt[-1], output[0]], output[2:4], output[4:7], [output[9]]]
    return [word for index, word in enumerate(words) if word not in words[:index]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_mixed_batch_of_settings_equals_generate(tiny: tuple[ModelRunner, Any], prompt: list[int]) -> None:
    runner, model = tiny
    words = bad_words_of(runner, prompt)
    together = {"repetition_penalty": 1.2, "sequence_bias": {(8,): 4.0, (20,): 3.0}}
    settings = SETTINGS | {
        "bad_words": ({"bad_words": tuple(map(tuple, words))}, {"bad_words_ids": words}),
        "together": (
            {
                "repetition_penalty": 1.2,
                "logit_bias": ((8, 4.0), (20, 3.0)),
                "bad_words": tuple(map(tuple, words)),
                "min_tokens": NEW_TOKENS,
                "stop_token_ids": tuple(STOP_IDS),
            },
            together | {"bad_words_ids": words, "min_new_tokens": NEW_TOKENS},
        ),
    }
    sequences = [make_sequence(index, prompt, **ours) for index, (ours, _) in enumerate(settings.values())]
    while sequences[0].num_output_tokens < NEW_TOKENS:
        assert not step(runner, sequences, 512).errors
    for sequence, (name, (_, theirs)) in zip(sequences, settings.items(), strict=True):
        ids = torch.tensor([prompt])
        eos = STOP_IDS if "min_new_tokens" in theirs else None
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            **theirs,
        )[0, len(prompt) :].tolist()
        # `generate` ends with the stop id; the runner does not check for stops.
        assert sequence.output_token_ids[: len(expected)] == expected, name
        assert len(expected) == NEW_TOKENS or name == "min_tokens"
    same_as_plain = [
        name
        for sequence, name in zip(sequences, settings, strict=True)
        if sequence.output_token_ids == sequences[0].output_token_ids
    ]
    assert same_as_plain == ["plain"]


@pytest.mark.parametrize("chunk", [1, 2, 7, 15, 16, 17, 33, 512])
def test_context_logits_of_every_chunk_size_equal_transformers(
    tiny: tuple[ModelRunner, Any], chunk: int
) -> None:
    runner, model = tiny
    sequences = [make_sequence(n, prompt, returns_context_logits=n != 1) for n, prompt in enumerate(PROMPTS)]
    parts: dict[int, list[bytes]] = {n: [] for n in range(len(PROMPTS))}
    while pending := [s for s in sequences if s.num_output_tokens < 3]:
        for sequence_id, part in step(runner, pending, chunk).context_logits.items():
            parts[sequence_id].append(part)
    assert parts.pop(1) == []
    for n, found in parts.items():
        logits = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32).view(-1, 97)
        with torch.no_grad():
            expected = model(torch.tensor([PROMPTS[n]])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_step_past_the_prompt_gives_only_the_prompts_positions(tiny: tuple[ModelRunner, Any]) -> None:
    runner, model = tiny
    # As after a preemption: the output is computed again with the prompt.
    sequence = make_sequence(0, PROMPTS[0], returns_context_logits=True)
    sequence.token_ids += [4, 5, 6]
    context = step(runner, [sequence], 512).context_logits[0]
    logits = torch.frombuffer(bytearray(context), dtype=torch.float32).view(-1, 97)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_poisoned_sequence_gets_no_logits(tiny: tuple[ModelRunner, Any]) -> None:
    runner, _ = tiny
    asks: dict[str, Any] = {
        "returns_context_logits": True,
        "returns_generation_logits": True,
        "num_log_probs": 2,
        "num_prompt_log_probs": 2,
    }
    sequences = [make_sequence(n, PROMPTS[2], **asks) for n in range(2)]
    step(runner, sequences, 30)
    with torch.inference_mode():
        runner._pool.layers[0].value[sequences[0].block_table] = torch.nan
    output = step(runner, sequences, 512)
    assert list(output.errors) == [0]
    assert list(output.prompt_log_probs) == [1]
    for found in (output.context_logits, output.generation_logits, output.log_probs):
        assert list(found) == [1]
    runner.clear_blocks([sequences[0].block_table])


def test_a_sequence_to_which_no_token_is_possible_fails_alone(tiny: tuple[ModelRunner, Any]) -> None:
    runner, _ = tiny
    sequences = [make_sequence(0, [1], allowed_token_ids=(3,), bad_words=((3,),)), make_sequence(1, [1])]
    output = step(runner, sequences, 512)
    assert list(output.errors) == [0]
    assert list(output.sampled_token_ids) == [1]


def test_generation_logits_are_what_the_token_was_drawn_from(tiny: tuple[ModelRunner, Any]) -> None:
    runner, model = tiny
    sequence = make_sequence(
        0, PROMPTS[0], returns_generation_logits=True, num_log_probs=0, repetition_penalty=1.5
    )
    for _ in range(4):
        with torch.no_grad():
            expected = model(torch.tensor([sequence.token_ids])).logits[0, -1]
        output = step(runner, [sequence], 512)
        logits = torch.frombuffer(bytearray(output.generation_logits[0][0]), dtype=torch.float32)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        log_prob = float(expected.log_softmax(0)[sequence.token_ids[-1]])
        assert output.log_probs[0][0].log_prob == pytest.approx(log_prob, abs=1e-3)
