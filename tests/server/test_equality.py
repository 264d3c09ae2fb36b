"""The tokens are transformers' own, whatever else the engine is doing."""

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
from helpers.server import Server, eventually, start_server

NUM_TOKENS = 48


def make_prompts() -> list[list[int]]:
    draw = random.Random(11)
    lengths = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1500]
    lengths += [draw.randrange(4, 120) for _ in range(32 - len(lengths))]
    return [[draw.randrange(3, 49000) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def reference(default_model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)


def assert_is_transformers_greedy(model: PreTrainedModel, prompt: list[int], served: list[int]) -> None:
    """By induction: given the prompt and the served prefix, transformers picks each served token."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + served[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == served


def greedy(prompt: list[int]) -> dict[str, object]:
    return llm_inputs(prompt, NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def served_at_once(server: Server) -> list[list[int]]:
    streams = [Stream(server.grpc, "llm", greedy(prompt)) for prompt in PROMPTS]
    return [stream.join(300).token_ids for stream in streams]


def test_all_at_once_equals_transformers(reference: PreTrainedModel, served_at_once: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, served_at_once, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_is_transformers_greedy(reference, prompt, tokens)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_one_by_one_equals_all_at_once(server: Server, served_at_once: list[list[int]], every: int) -> None:
    alone = [ask(server.grpc, "llm", greedy(prompt)).token_ids for prompt in PROMPTS[::every]]
    assert alone == served_at_once[::every]


def test_random_arrivals_change_nothing(server: Server, served_at_once: list[list[int]]) -> None:
    draw = random.Random(3)
    results: dict[int, list[int]] = {}

    def run(number: int) -> None:
        results[number] = ask(server.grpc, "llm", greedy(PROMPTS[number])).token_ids

    timers = [threading.Timer(draw.uniform(0, 5), run, args=(number,)) for number in range(len(PROMPTS))]
    for timer in timers:
        timer.start()
    for timer in timers:
        timer.join(300)
    assert [results[number] for number in range(len(PROMPTS))] == served_at_once


def test_forced_preemption_changes_nothing(default_model_dir: Path, served_at_once: list[list[int]]) -> None:
    """8 sequences of up to 7 blocks in a pool of 12."""
    block_bytes = 16 * 46080
    options = ("--dtype", "float32", "--block-size", "16", "--kv-cache-bytes", str(12 * block_bytes))
    chosen = [number for number, prompt in enumerate(PROMPTS) if len(prompt) <= 65][:8]
    small = start_server(default_model_dir, *options)
    try:
        streams = [Stream(small.grpc, "llm", greedy(PROMPTS[number])) for number in chosen]
        assert [stream.join(300).token_ids for stream in streams] == [
            served_at_once[number] for number in chosen
        ]
        eventually(lambda: small.metric("vllm:num_preemptions_total") > 0)
        eventually(lambda: small.used_blocks() == 0)
        eventually(lambda: small.metric("vllm:num_preemptions_total") > 0)
    finally:
        assert small.stop() == 0


@pytest.mark.parametrize("way", WAYS)
def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(server: Server, way: str) -> None:
    def seeded(number: int) -> list[int]:
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": number}
        return served(server, way, PROMPTS[number], max_tokens=24, ignore_eos=True, **sampling).token_ids

    alone = [seeded(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(seeded, range(6))) == alone
