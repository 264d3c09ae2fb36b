"""`transformers` for comparison: greedy `generate` and `generate_batch`, without an end-of-text id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from perf.common.torch_threads import all_cores
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from naiad.cli.bench.throughput import Generate, Prompts, check_counts

# The default of `generate_batch`.
_PAGE_TOKENS = 256
_MAX_BATCH_TOKENS = 8_192


def transformers_generate(model_dir: Path, dtype: str) -> Generate:
    """Load the checkpoint with `transformers`, on the CPU.

    Args:
        model_dir: the checkpoint.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        A function (prompts of equal length, number of new tokens) → the new ids of each prompt.
    """
    return padded_generate(load_transformers(model_dir, dtype, "cpu"))


def load_transformers(model_dir: Path, dtype: str, device: str) -> Any:
    """Load the model to a device; dtype as for `transformers_generate`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).to(device)
    # The checkpoint's own sampling defaults and eos would change the tokens and their number.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def padded_generate(model: Any) -> Generate:
    """Wrap the model's `generate` for a padded batch; the result is that of `transformers_generate`."""

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode(), all_cores():
            ids = model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_tokens
            )
        made: list[list[int]] = ids[:, input_ids.shape[1] :].tolist()
        check_counts(made, num_tokens)
        return made

    return generate


def paged_generate_s(model: Any, prompts: Prompts, num_tokens: int) -> tuple[float, float]:
    """Time the model's `generate_batch` (continuous batching over a paged cache) by its own timestamps.

    Args:
        model: from `load_transformers`.
        prompts: prompts of equal length.
        num_tokens: number of new tokens for each.

    Returns:
        Seconds from the requests until all have their first token, and until all have all tokens. Time
        before it accepts requests is not counted.
    """
    length = len(prompts[0])
    settings = ContinuousBatchingConfig(
        num_blocks=len(prompts) * -(-(length + num_tokens + 1) // _PAGE_TOKENS) + 8,
        max_batch_tokens=min(_MAX_BATCH_TOKENS, len(prompts) * length),
    )
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=num_tokens),
        continuous_batching_config=settings,
        record_timestamps=True,
    ).values()
    check_counts([output.generated_tokens for output in outputs], num_tokens)
    begin_s = min(output.created_time for output in outputs)
    first_s = max(output.timestamps[0] for output in outputs)
    return first_s - begin_s, max(output.timestamps[-1] for output in outputs) - begin_s
