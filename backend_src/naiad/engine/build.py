"""The composition root."""

from __future__ import annotations

from functools import partial

from naiad.config import EngineConfig
from naiad.engine.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.model_runner import ModelRunner
from naiad.scheduler.policies import make_policy
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
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
    return Engine(Scheduler(kv_cache, limits, policy), model_runner, partial(TextStream, token_table))
