"""The whole engine on the default model in float32, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.outputs import RequestOutput
from naiad.sequence import BeamParams, EngineRequest, SamplingParams

SYSTEM = "You are a careful librarian who answers in one short sentence. " * 8
QUESTIONS = ["The capital of France is", "1, 2, 3, 4,", "Water boils at", "The library opens"]


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(default_model_dir)


def make_engine(default_model_dir: Path, enable_prefix_caching: bool) -> Engine:
    return build_engine(
        EngineConfig(
            model_dir=str(default_model_dir),
            dtype="float32",
            max_num_batched_tokens=96,
            block_size=16,
            kv_cache_bytes=200 << 20,
            enable_prefix_caching=enable_prefix_caching,
        )
    )


@pytest.fixture(scope="module")
def engine(default_model_dir: Path) -> Engine:
    return make_engine(default_model_dir, enable_prefix_caching=True)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    for request in requests:
        engine.add_request(request)
    outputs: dict[int, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            if not output.only_started:
                outputs.setdefault(output.sequence_id, []).append(output)
    assert engine.stats().num_used_blocks == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_prefix_cache_changes_no_token(
    default_model_dir: Path, engine: Engine, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    prompts = [tokenizer(SYSTEM + question)["input_ids"] for question in QUESTIONS]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
    requests = [
        EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params)
        for number, prompt in enumerate(prompts)
    ]
    expected = run(make_engine(default_model_dir, enable_prefix_caching=False), requests)
    for _ in range(2):
        made = run(engine, requests)
        assert {n: tokens_of(made[n]) for n in made} == {n: tokens_of(expected[n]) for n in expected}
    assert all(made[number][-1].num_cached_tokens > len(prompts[0]) // 2 for number in made)


def test_siblings_are_what_their_seeds_give_alone(
    engine: Engine, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    from naiad.sampling.noise import sibling_seed

    prompt = tokenizer(QUESTIONS[3])["input_ids"]

    def request(sequence_id: int, seed: int, sibling_ids: tuple[int, ...] = ()) -> EngineRequest:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
        return EngineRequest(
            sequence_id=sequence_id, prompt_token_ids=prompt, params=params, sibling_ids=sibling_ids
        )

    together = run(engine, [request(0, 7, (1, 2))])
    alone = [run(engine, [request(0, sibling_seed(7, index))])[0] for index in range(3)]
    assert [tokens_of(together[index]) for index in range(3)] == [tokens_of(each) for each in alone]
    assert len({tuple(tokens_of(each)) for each in alone}) == 3


@pytest.mark.parametrize(("width", "length_penalty", "stops_early"), [(2, 1.0, False), (4, 0.5, True)])
def test_beams_and_scores_are_those_of_transformers(
    default_model_dir: Path,
    engine: Engine,
    tokenizer: transformers.PreTrainedTokenizerBase,
    width: int,
    length_penalty: float,
    stops_early: bool,
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    params = SamplingParams(max_tokens=10, stop_token_ids=(28, 30), repetition_penalty=1.2)
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    requests = [
        EngineRequest(
            sequence_id=10 * number,
            prompt_token_ids=prompt,
            params=params,
            sibling_ids=tuple(range(10 * number + 1, 10 * number + width)),
            beam=BeamParams(length_penalty=length_penalty, stops_early=stops_early),
        )
        for number, prompt in enumerate(prompts)
    ]
    made = run(engine, requests)
    for number, prompt in enumerate(prompts):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=transformers.GenerationConfig(
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=params.max_tokens,
                length_penalty=length_penalty,
                early_stopping=stops_early,
                repetition_penalty=params.repetition_penalty,
                eos_token_id=list(params.stop_token_ids),
                pad_token_id=2,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            ),
        )
        outputs = [made[10 * number + index][0] for index in range(width)]
        scores = [output.cum_log_prob for output in outputs]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
        for output, ids in zip(outputs, expected.sequences.tolist(), strict=True):
            assert ids[len(prompt) : len(prompt) + len(output.token_ids)] == output.token_ids
