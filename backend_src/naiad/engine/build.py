"""The composition root."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from naiad.config import EngineConfig
from naiad.engine.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.model_runner import ModelRunner
from naiad.scheduler.policies import make_policy
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.speculation.drafter import Drafter
from naiad.speculation.ngram_drafter import NGramDrafter
from naiad.speculation.policy import SpeculationPolicy, StepCost
from naiad.speculation.speculator import Speculator
from naiad.speculation.suffix_drafter import SuffixDrafter
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable


def build_engine(config: EngineConfig) -> Engine:
    """Load the checkpoint, join the parts.

    Raises:
        StartupError: names what is wrong with configuration, checkpoint or machine, and the remedy.
    """
    token_table = TokenTable.from_directory(config.model_dir)
    model_runner = ModelRunner(config)
    prefix_cache = PrefixCache(config.block_size) if config.enable_prefix_caching else None
    kv_cache = KVCacheManager(model_runner.num_blocks, config.block_size, prefix_cache)
    policy = make_policy(config.scheduling_policy, config.priority_aging_ms / 1000)
    # Every running sequence gets its next token in every step.
    budget = model_runner.token_budget
    num_tokens = max(budget.num_tokens, config.max_num_seqs)
    limits = SchedulerLimits(config.max_num_seqs, num_tokens, budget.context_cost, budget.decode_cost)
    scheduler = Scheduler(kv_cache, limits, policy, _speculator(config, model_runner))
    return Engine(scheduler, model_runner, partial(TextStream, token_table))


def _speculator(config: EngineConfig, model_runner: ModelRunner) -> Speculator:
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "ngram": NGramDrafter,
        "suffix": SuffixDrafter,
    }
    policy = SpeculationPolicy(StepCost(model_runner.measure_step_costs()))
    return Speculator(drafters[config.drafter](), policy, config.num_speculative_tokens)
