"""The tokens equal those of transformers, whatever else the engine is doing.

Most tests use a tiny model, because its tokens reveal errors as well as a large model's.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.raw_grpc import Stream, ask, llm_inputs
from helpers.served import WAYS, served
from helpers.server import Leaving, Server, eventually, start_server

NUM_TOKENS = 48
ARRIVALS_S = 1.0


def make_prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def crowd_lengths() -> list[int]:
    draw = random.Random(11)
    lengths = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1500]
    return lengths + [draw.randrange(4, 120) for _ in range(32 - len(lengths))]


PROMPTS = make_prompts(crowd_lengths(), 400)
PROMPTS_OF_DEFAULT_MODEL = make_prompts(crowd_lengths(), 49_000)


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)


def assert_is_transformers_greedy(model: PreTrainedModel, prompt: list[int], served: list[int]) -> None:
    """Check, by induction, that transformers picks each served token after the served prefix."""
    assert len(served) == NUM_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + served[:-1]]), logits_to_keep=len(served)).logits[0]
    assert logits.argmax(-1).tolist() == served


def greedy(prompt: list[int]) -> dict[str, object]:
    return llm_inputs(prompt, NUM_TOKENS, ignore_eos=True)


def all_at_once(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    streams = [Stream(server.grpc, "llm", greedy(prompt)) for prompt in prompts]
    return [stream.join(300).token_ids for stream in streams]


@pytest.fixture(scope="module")
def served_at_once(tiny: Server) -> list[list[int]]:
    return all_at_once(tiny, PROMPTS)


def test_all_at_once_equals_transformers(reference: PreTrainedModel, served_at_once: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, served_at_once, strict=True):
        assert_is_transformers_greedy(reference, prompt, tokens)


def test_the_default_models_tokens_equal_transformers(server: Server, default_model_dir: Path) -> None:
    served_at_once = all_at_once(server, PROMPTS_OF_DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS_OF_DEFAULT_MODEL, served_at_once, strict=True):
        assert_is_transformers_greedy(model, prompt, tokens)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_one_by_one_equals_all_at_once(tiny: Server, served_at_once: list[list[int]], every: int) -> None:
    alone = [ask(tiny.grpc, "llm", greedy(prompt)).token_ids for prompt in PROMPTS[::every]]
    assert alone == served_at_once[::every]


def test_random_arrivals_change_nothing(tiny: Server, served_at_once: list[list[int]]) -> None:
    draw = random.Random(3)
    results: dict[int, list[int]] = {}

    def run(number: int) -> None:
        results[number] = ask(tiny.grpc, "llm", greedy(PROMPTS[number])).token_ids

    timers = [
        threading.Timer(draw.uniform(0, ARRIVALS_S), run, args=(number,)) for number in range(len(PROMPTS))
    ]
    for timer in timers:
        timer.start()
    for timer in timers:
        timer.join(300)
    assert [results[number] for number in range(len(PROMPTS))] == served_at_once


def test_forced_preemption_changes_nothing(
    tiny_dir: Path, leaving: Leaving, served_at_once: list[list[int]]
) -> None:
    """Run 8 sequences of up to 7 blocks in a pool of 12, again until they have met there."""
    block_bytes = 16 * 2 * 3 * 2 * 10 * 4
    options = ("--dtype", "float32", "--block-size", "16", "--kv-cache-bytes", str(12 * block_bytes))
    chosen = [number for number, prompt in enumerate(PROMPTS) if len(prompt) <= 65][:8]
    small = start_server(tiny_dir, *options)

    def preempted_in_one_more_round() -> bool:
        tokens = all_at_once(small, [PROMPTS[number] for number in chosen])
        assert tokens == [served_at_once[number] for number in chosen]
        return small.metric("vllm:num_preemptions_total") > 0

    try:
        eventually(preempted_in_one_more_round)
        eventually(lambda: small.used_blocks() == 0)
    finally:
        leaving.take(small)


@pytest.mark.parametrize("way", WAYS)
def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(tiny: Server, way: str) -> None:
    def seeded(number: int) -> list[int]:
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": number}
        return served(tiny, way, PROMPTS[number], max_tokens=24, ignore_eos=True, **sampling).token_ids

    alone = [seeded(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(seeded, range(6))) == alone
