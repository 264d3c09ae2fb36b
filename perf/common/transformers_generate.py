"""`transformers` as a contestant: greedy `generate` of a padded batch, without an end of text."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from naiad.cli.throughput import Generate, Prompts, check_counts


def transformers_generate(model_dir: Path, dtype: str) -> Generate:
    """Load the checkpoint with `transformers`.

    Args:
        model_dir: the checkpoint.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        prompts of one length, number of new tokens → the new ids of each prompt.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    # The checkpoint's own sampling defaults and eos would make other tokens than asked for.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            ids = model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_tokens
            )
        made: list[list[int]] = ids[:, input_ids.shape[1] :].tolist()
        check_counts(made, num_tokens)
        return made

    return generate
