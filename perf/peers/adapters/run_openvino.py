"""The adapter of OpenVINO GenAI: its pipeline with continuous batching."""

from __future__ import annotations

import math

import numpy as np
import openvino_genai
from openvino import Tensor
from protocol import Engine, Load, serve


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

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return Engine(generate)


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino", "optimum-intel"])
