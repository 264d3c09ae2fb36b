"""Log-probabilities of prompts from real models, against transformers' float32 log-softmax."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from helpers.drafting_engines import engine_parts
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.sequence import EngineRequest, SamplingParams

TOLERANCE = 1e-4
NUM_TOP = 4
KERNELS = ["auto", "torch"]
_chance = random.Random(3)
PROMPTS = [[_chance.randrange(96) for _ in range(length)] for length in (1, 2, 16, 17, 33, 150)]
Described = list[TokenLogProbs]


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Gemma3ForCausalLM"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, make_tiny_model(directory, request.param)


def asked(sequence_id: int, prompt: list[int], num_siblings: int = 0, **params: Any) -> EngineRequest:
    ids = tuple(range(sequence_id + 1, sequence_id + 1 + num_siblings))
    made = SamplingParams(**{"max_tokens": 4, "num_prompt_log_probs": NUM_TOP, **params})
    return EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=made, sibling_ids=ids)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    outputs: dict[int, list[RequestOutput]] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error_message == ""
            outputs.setdefault(output.sequence_id, []).append(output)
    return outputs


def described(outputs: list[RequestOutput]) -> Described:
    """What is reported of a prompt; it is reported once."""
    found = [output.prompt_log_probs for output in outputs if output.prompt_log_probs]
    assert len(found) <= 1
    return found[0] if found else []


def assert_described(found: Described, model: Any, prompt: list[int]) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(1)
    assert len(found) == len(prompt) - 1
    for each, row, token_id in zip(found, expected, prompt[1:], strict=False):
        assert each.log_prob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        ranks = (row > row[token_id] + TOLERANCE).sum() + 1, (row >= row[token_id] - TOLERANCE).sum()
        assert ranks[0] <= each.rank <= ranks[1]
        assert each.top_log_probs == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=TOLERANCE)
        assert each.top_log_probs == pytest.approx(row[each.top_token_ids].tolist(), abs=TOLERANCE)
        if token_id in each.top_token_ids:
            # Clients compare the two to learn whether a token is the best.
            assert each.log_prob == each.top_log_probs[each.top_token_ids.index(token_id)]


@pytest.mark.parametrize("cpu_kernels", KERNELS)
@pytest.mark.parametrize("budget", [1, 2, 7, 16, 17, 64, 65, 512])
def test_prompts_in_chunks_of_every_size_equal_transformers(
    tiny: tuple[Path, Any], budget: int, cpu_kernels: str
) -> None:
    directory, model = tiny
    prompts = PROMPTS if budget > 2 else PROMPTS[:5]
    num_blocks = min(128, 16 * budget)  # no more than so many sequences need
    engine, _ = engine_parts(directory, num_blocks, budget, cpu_kernels=cpu_kernels)
    outputs = run(engine, [asked(number, prompt) for number, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert_described(described(outputs[number]), model, prompt)


@pytest.mark.parametrize("cpu_kernels", KERNELS)
def test_neighbours_do_not_change_by_a_bit(tiny: tuple[Path, Any], cpu_kernels: str) -> None:
    directory, model = tiny

    def neighbours_beside(**params: Any) -> dict[int, list[RequestOutput]]:
        engine, _ = engine_parts(directory, budget=32, is_cached=False, cpu_kernels=cpu_kernels)
        # `num_log_probs` shows their bits.
        neighbours = [
            asked(
                10 * n, prompt, max_tokens=12, num_prompt_log_probs=-1, num_log_probs=3, temperature=1, seed=n
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        asking = [asked(10 * n + 5, prompt, **params) for n, prompt in enumerate(PROMPTS)]
        outputs = run(engine, [each for pair in zip(neighbours, asking, strict=True) for each in pair])
        for n, prompt in enumerate(PROMPTS):
            if params["num_prompt_log_probs"] >= 0:
                assert_described(described(outputs[10 * n + 5]), model, prompt)
        return {n: outputs[10 * n] for n in range(len(PROMPTS))}

    def bits(outputs: dict[int, list[RequestOutput]]) -> list[Any]:
        return [(output.token_ids, output.log_probs) for each in outputs.values() for output in each]

    assert bits(neighbours_beside(num_prompt_log_probs=NUM_TOP)) == bits(
        neighbours_beside(num_prompt_log_probs=-1)
    )


@pytest.mark.parametrize("cpu_kernels", KERNELS)
def test_prompts_that_are_preempted_are_described_whole_and_once(
    tiny: tuple[Path, Any], cpu_kernels: str
) -> None:
    directory, model = tiny
    prompts = [[(17 * n + 5 * place) % 96 for place in range(40 + n)] for n in range(6)]
    # Rows that run long, and take the blocks of others.
    engine, _ = engine_parts(directory, num_blocks=16, budget=16, cpu_kernels=cpu_kernels)
    requests = [asked(n, prompt, max_tokens=60) for n, prompt in enumerate(prompts)]
    outputs = run(engine, requests)
    assert engine.stats().total_preemptions > 0
    for n, prompt in enumerate(prompts):
        assert_described(described(outputs[n]), model, prompt)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_drafts_change_nothing(tiny: tuple[Path, Any], drafter: str) -> None:
    directory, model = tiny
    settings: dict[str, Any] = {"drafter": drafter}
    if drafter == "draft_model":
        settings["draft_model"] = str(directory)
    repeating = [[5, 6, 7, 8, 9] * 6, [3, 1] * 10]
    engine, _ = engine_parts(directory, budget=24, **settings)
    outputs = run(engine, [asked(n, prompt, max_tokens=30) for n, prompt in enumerate(repeating)])
    assert sum(engine.stats().total_accepted_tokens_at) > 0
    for n, prompt in enumerate(repeating):
        assert_described(described(outputs[n]), model, prompt)


def test_drafts_that_the_client_offers_follow_the_prompt(tiny: tuple[Path, Any]) -> None:
    directory, model = tiny
    engine, _ = engine_parts(directory, budget=64, drafter="ngram")
    plain = run(engine, [asked(1, PROMPTS[4], max_tokens=6)])[1]
    guess = tuple(token_id for output in plain for token_id in output.token_ids)
    request = msgspec.structs.replace(asked(2, PROMPTS[4], max_tokens=6), draft_token_ids=guess)
    outputs = run(engine, [request])[2]
    assert outputs[-1].num_accepted_tokens > 0
    assert_described(described(outputs), model, PROMPTS[4])


def test_of_several_sequences_only_the_first_describes_the_prompt(tiny: tuple[Path, Any]) -> None:
    directory, model = tiny
    engine, _ = engine_parts(directory, budget=20)
    outputs = run(engine, [asked(1, PROMPTS[4], num_siblings=3, temperature=1.0)])
    assert_described(described(outputs[1]), model, PROMPTS[4])
    assert [described(outputs[each]) for each in (2, 3, 4)] == [[], [], []]


def test_a_cached_prompt_is_computed_again_and_cached_for_others(tiny: tuple[Path, Any]) -> None:
    directory, model = tiny
    engine, _ = engine_parts(directory)
    for number in range(2):
        outputs = run(engine, [asked(number, PROMPTS[5])])
        assert_described(described(outputs[number]), model, PROMPTS[5])
        assert outputs[number][-1].num_cached_tokens == 0
    outputs = run(engine, [asked(9, PROMPTS[5], num_prompt_log_probs=-1)])
    assert outputs[9][-1].num_cached_tokens > 0


@pytest.mark.parametrize("cpu_kernels", KERNELS)
def test_few_logits_exist_at_once(
    tiny: tuple[Path, Any], cpu_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = tiny
    engine, runner = engine_parts(directory, budget=512, cpu_kernels=cpu_kernels)
    sizes: list[int] = []
    compute = runner._model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner._model, "logits", logits)
    outputs = run(engine, [asked(1, PROMPTS[5], max_tokens=1)])
    assert_described(described(outputs[1]), model, PROMPTS[5])
    assert sizes[:3] == [64, 64, 21]


def test_a_prompt_with_logits_and_log_probs(tiny: tuple[Path, Any]) -> None:
    directory, model = tiny
    engine, _ = engine_parts(directory, budget=19)
    outputs = run(engine, [asked(1, PROMPTS[5], returns_context_logits=True)])
    assert_described(described(outputs[1]), model, PROMPTS[5])
    (context,) = [each.context_logits for each in outputs[1] if each.context_logits]
    logits = torch.frombuffer(bytearray(context), dtype=torch.float32).view(len(PROMPTS[5]), -1)
    found = [each.log_prob for each in described(outputs[1])]
    own = logits.log_softmax(1)[range(len(PROMPTS[5]) - 1), PROMPTS[5][1:]]
    assert found == pytest.approx(own.tolist(), abs=1e-6)


def test_more_best_tokens_than_the_vocabulary_has(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, vocab_size=12, eos_token_id=11)
    engine, _ = engine_parts(tmp_path)
    outputs = run(engine, [asked(1, [1, 2, 3], num_prompt_log_probs=20)])
    assert [sorted(each.top_token_ids) for each in described(outputs[1])] == [list(range(12))] * 2


def test_the_default_model_in_float32_equals_transformers(default_model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    prompt = tokenizer("The library opens at nine, and closes when the last reader has gone home. " * 6)
    config = EngineConfig(
        model_dir=str(default_model_dir),
        dtype="float32",
        max_num_batched_tokens=40,
        block_size=16,
        kv_cache_bytes=64 << 20,
    )
    outputs = run(build_engine(config), [asked(1, prompt["input_ids"], max_tokens=1)])
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    found = described(outputs[1])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt["input_ids"]])).logits[0].log_softmax(1)
    own = expected[range(len(found)), prompt["input_ids"][1:]]
    assert [each.log_prob for each in found] == pytest.approx(own.tolist(), abs=1e-3)
    best = expected[: len(found)].topk(NUM_TOP).values
    assert torch.tensor([each.top_log_probs for each in found]).sub(best).abs().max() < 1e-3
