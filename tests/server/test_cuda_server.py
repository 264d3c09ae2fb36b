"""The real server with its engine on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from helpers.raw_grpc import Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually, start_server

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_TOKENS = 48
LENGTHS = (1, 15, 16, 17, 64, 65, 300, 700)


@pytest.fixture(scope="module")
def cuda_server(default_model_dir: Path) -> Iterator[Server]:
    options = ("--device", DEVICE, "--dtype", "float32", "--max-model-len", "2048")
    memory = ("--kv-cache-bytes", str(1 << 30))
    running = start_server(default_model_dir, *options, *memory, timeout_s=600)
    yield running
    assert running.stop() == 0, "\n".join(running.lines[-40:])


def greedy(prompt: list[int]) -> dict[str, object]:
    return llm_inputs(prompt, NUM_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    draw = random.Random(17)
    return [[draw.randrange(3, 49_000) for _ in range(length)] for length in LENGTHS]


def test_tokens_are_those_of_transformers(cuda_server: Server, default_model_dir: Path) -> None:
    prompts = make_prompts()
    streams = [Stream(cuda_server.grpc, "llm", greedy(prompt)) for prompt in prompts]
    served = [stream.join(300).token_ids for stream in streams]
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    for prompt, made in zip(prompts, served, strict=True):
        assert len(made) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + made[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == made


def test_a_text_through_the_ensemble(cuda_server: Server) -> None:
    outcome = ask(cuda_server.grpc, "ensemble", text_inputs("The capital of France is", 8))
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert "Paris" in outcome.text


def test_a_cancelled_stream_leaves_no_blocks(cuda_server: Server) -> None:
    stream = Stream(cuda_server.grpc, "llm", llm_inputs([5] * 40, 1900, ignore_eos=True))
    assert stream.got_response.wait(60)
    stream.cancel()
    eventually(lambda: cuda_server.used_blocks() == 0)


def test_no_kernel_was_compiled_while_a_request_waited(cuda_server: Server) -> None:
    ask(cuda_server.grpc, "llm", llm_inputs([9] * 500, 20, ignore_eos=True, runtime_top_k=7))
    assert cuda_server.settled("naiad_late_compiles_total") == 0


def test_the_engines_memory_on_the_gpu_is_reported(cuda_server: Server) -> None:
    def gpu_bytes() -> float:
        return cuda_server.metric("nv_trt_llm_runtime_memory_metrics", memory_type="gpu")

    ask(cuda_server.grpc, "llm", greedy([7] * 20))
    eventually(lambda: gpu_bytes() > 1 << 30)
