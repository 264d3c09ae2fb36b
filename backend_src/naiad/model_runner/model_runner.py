"""`ModelRunner`: owns weights and KV cache, computes steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError, InternalError, NaiadError
from naiad.model_runner.context_logits import context_logits
from naiad.model_runner.device import (
    check_memory,
    default_kv_cache_bytes,
    resolve_device,
    resolve_dtype,
    use_physical_cores,
)
from naiad.model_runner.kv_pool import KVPool, num_pool_blocks
from naiad.model_runner.step_costs import measure_step_costs
from naiad.model_runner.step_inputs import StepInputs, build_step_inputs
from naiad.model_runner.token_budget import CUDA_BUDGET, TokenBudget, measure_token_budget, probe_steps
from naiad.models import load_model
from naiad.outputs import ModelOutput, SchedulerOutput
from naiad.sampling.sampler import Sampler
from naiad.sampling.verification import sampled_views, verify
from naiad_kernels.paged_attention.layout import CacheLayout

_NOT_FINITE = "the model computed numbers that are not finite for this request"


class ModelRunner:
    """Runs steps for one checkpoint on one device.

    Attributes:
        model_config: the checkpoint's shape.
        dtype, device: what it computes in and on.
        num_blocks: size of the KV pool.
        max_model_len: tokens of prompt and output together, at most.
        token_budget: what a step may compute.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model, size the KV pool, choose the token budget.

        Raises:
            ConfigError: a setting this machine or checkpoint can not honour.
            ModelError: the checkpoint is missing, damaged or not supported.
            StartupError: too little memory.
        """
        self.model_config = ModelConfig.from_directory(config.model_dir)
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        use_physical_cores()
        check_memory(config.model_dir, self.model_config, self.dtype, self.device)
        with torch.inference_mode():
            self._model = load_model(config.model_dir, self.model_config, self.dtype, self.device)
            self._pool = self._allocate_pool(config)
        self.num_blocks = self._pool.num_blocks
        self.max_model_len = self._max_model_len(config)
        self._layout = CacheLayout(
            num_heads=self.model_config.num_heads,
            num_kv_heads=self.model_config.num_kv_heads,
            head_dim=self.model_config.head_dim,
            block_size=config.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._sampler = Sampler(self.model_config.vocab_size)
        self.token_budget = self._choose_budget(config)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> ModelOutput:
        """Compute one step.

        Returns:
            A token for every sequence with `samples`, or an error for every sequence whose
            numbers are not finite or to which no token is possible; the others are untouched by
            it. Log-probabilities and logits for sequences that ask for them.
        """
        if not output.scheduled:
            return ModelOutput({})
        self._pool.copy(output.block_copies)
        inputs = build_step_inputs(output, self._layout)
        hidden = self._model.forward(inputs.batch, self._pool.layers)
        errors = _rows_not_finite(hidden, inputs)
        context = context_logits(inputs, hidden, self._model.logits, errors)
        sampled = self._sample(inputs, hidden, errors)
        return replace(sampled, errors={**errors, **sampled.errors}, context_logits=context)

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor, errors: dict[int, NaiadError]) -> ModelOutput:
        """New tokens of the rows that sample and have not failed."""
        chosen = [
            (end, row)
            for end, row in zip(inputs.ends, inputs.rows, strict=True)
            if row.samples and row.sequence.sequence_id not in errors
        ]
        if not chosen:
            return ModelOutput({})
        rows = [row for _, row in chosen]
        places = [place for end, row in chosen for place in range(end - 1 - len(row.draft_token_ids), end)]
        logits = self._model.logits(hidden.index_select(0, torch.tensor(places, device=self.device)))
        views = sampled_views(rows)
        sampled = self._sampler.sample(logits, [view for row_views in views for view in row_views])
        return verify(rows, views, sampled)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: list[int]) -> None:
        """Set KV blocks to 0: their keys or values may not be finite, and somebody will get them."""
        if block_ids:
            self._pool.zero(block_ids)

    def measure_step_costs(self) -> list[tuple[int, float]]:
        """(tokens, seconds) of steps, few tokens first; takes about two seconds on a CPU."""
        return measure_step_costs(self.run, self.max_model_len, self._layout.block_size)

    def _allocate_pool(self, config: EngineConfig) -> KVPool:
        kv_cache_bytes = config.kv_cache_bytes or default_kv_cache_bytes(self.device)
        num_blocks = num_pool_blocks(config, self.model_config, self.dtype, kv_cache_bytes)
        try:
            return KVPool(self.model_config, num_blocks, config.block_size, self.dtype, self.device)
        except RuntimeError as error:
            raise ConfigError(
                "kv_cache_bytes", kv_cache_bytes, f"a size that fits in memory ({error})"
            ) from error

    def _max_model_len(self, config: EngineConfig) -> int:
        limit = self.model_config.max_position_embeddings
        longest = min(config.max_model_len or limit, limit)
        return min(longest, self.num_blocks * config.block_size)

    def _choose_budget(self, config: EngineConfig) -> TokenBudget:
        if config.max_num_batched_tokens:
            return TokenBudget(config.max_num_batched_tokens)
        if self.device.type == "cuda":
            return CUDA_BUDGET
        short, long = probe_steps(self.max_model_len, config.block_size)
        budget = measure_token_budget(self.run, short, long)
        self.clear_blocks(long.scheduled[0].sequence.block_table)
        return budget


def _rows_not_finite(hidden: torch.Tensor, inputs: StepInputs) -> dict[int, NaiadError]:
    """Sequences with a token whose hidden state is not finite, sampled from or not."""
    if bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
        return {}
    is_finite = torch.isfinite(hidden).all(dim=1).tolist()
    errors: dict[int, NaiadError] = {}
    start = 0
    for end, row in zip(inputs.ends, inputs.rows, strict=True):
        if not all(is_finite[start:end]):
            errors[row.sequence.sequence_id] = InternalError(_NOT_FINITE)
        start = end
    return errors
