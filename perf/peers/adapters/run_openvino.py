"""The adapter of OpenVINO GenAI: its pipeline with continuous batching."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openvino_genai
from openvino import Tensor
from protocol import Engine, Load, Requests, serve


def load(task: Load) -> Engine:
    """Load the exported model; the option `kv` is the KV cache's precision, "bf16", "f16", "f32" or "u8"."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = math.ceil(task.kv_tokens * task.options["kv_token_bytes"] / 2**30)
    scheduler.max_num_seqs = task.max_batch
    scheduler.max_num_batched_tokens = task.options["max_num_batched_tokens"]
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": task.options["precision"],
        "KV_CACHE_PRECISION": task.options["kv"],
        "INFERENCE_NUM_THREADS": task.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(task.model, scheduler, "CPU", properties)

    handles: dict[int, Any] = {}

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [_greedy(new_tokens)] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    def add(number: int, prompt: list[int], new_tokens: int) -> None:
        ids = Tensor(np.array([prompt], dtype=np.int64))
        handles[number] = pipeline.add_request(number, ids, _greedy(new_tokens))

    def step() -> dict[int, int]:
        pipeline.step()
        return _read(handles)

    return Engine(generate, Requests(add, step))


def _greedy(new_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = new_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _read(handles: dict[int, Any]) -> dict[int, int]:
    """How many tokens each request got; those that have ended are taken out of `handles`."""
    made: dict[int, int] = {}
    for number, handle in list(handles.items()):
        while handle.can_read():
            new = sum(len(output.generated_ids) for output in handle.read().values())
            made[number] = made.get(number, 0) + new
        if handle.get_status() == openvino_genai.GenerationStatus.IGNORED:
            raise RuntimeError("OpenVINO has no room in its cache for a request")
        if handle.get_status() == openvino_genai.GenerationStatus.FINISHED:
            del handles[number]
    return made


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino", "optimum-intel"])
