"""The adapter of transformers: `generate` of a padded batch."""

from __future__ import annotations

import time

import torch
from protocol import Engine, Load, serve
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)


class _StepTimes(LogitsProcessor):
    """Notes when each step's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def load(task: Load) -> Engine:
    """Load the checkpoint; the option `dtype` is "float32" or "bfloat16"."""
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.options["dtype"]))
    # The checkpoint's own sampling defaults and eos would change the tokens and their number.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(
        prompts: list[list[int]], new_tokens: int, times: _StepTimes | None = None
    ) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                logits_processor=LogitsProcessorList([] if times is None else [times]),
            )
        tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return tokens

    def step_times(prompts: list[list[int]], new_tokens: int) -> list[float]:
        times = _StepTimes()
        generate(prompts, new_tokens, times)
        return times.times

    return Engine(generate, step_times)


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
