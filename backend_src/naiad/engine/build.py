"""The composition root: builds an engine from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from naiad.config import EngineConfig
from naiad.engine.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import CacheObserver, PrefixCache
from naiad.model_runner import ModelRunner
from naiad.scheduler.policies import make_policy
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.speculation.draft_slots import DraftSlots
from naiad.speculation.drafter import Drafter
from naiad.speculation.model_drafter import MAX_CAUGHT_UP_TOKENS, ModelDrafter
from naiad.speculation.ngram_drafter import NGramDrafter
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost
from naiad.speculation.suffix_drafter import SuffixDrafter
from naiad.tokenization.same_tokens import check_same_tokens
from naiad.tokenization.text_stream import TextStream
from naiad.tokenization.token_table import TokenTable

# Steps that cost the same with and without drafts: drafts are tried as long as any are accepted.
_FLAT_COSTS = [(1, 1.0), (1 << 16, 1.0)]


def build_engine(config: EngineConfig, cache_observer: CacheObserver | None = None) -> Engine:
    """Load the checkpoints and put the engine's parts together.

    Args:
        config: the engine's configuration.
        cache_observer: is told of what comes to the prefix cache and goes from it.

    Raises:
        StartupError: the configuration, a checkpoint or the machine is not suitable; the message names the
            problem and the remedy.
    """
    token_table = TokenTable.from_directory(config.model_dir)
    if config.draft_model:
        check_same_tokens(config.model_dir, config.draft_model)
    model_runner = ModelRunner(config)
    config = replace(config, drafter=model_runner.drafter)
    policy = make_policy(config.scheduling_policy, config.priority_aging_ms / 1000)
    # The budget must allow every running sequence its next token in every step.
    budget = model_runner.token_budget
    num_tokens = max(budget.num_tokens, config.max_num_seqs)
    limits = SchedulerLimits(config.max_num_seqs, num_tokens, budget.context_cost, budget.decode_cost)
    kv_cache = make_kv_cache(config, model_runner.kv_groups, num_tokens, cache_observer)
    drafter = make_drafter(config, model_runner, kv_cache)
    speculator = Speculator(drafter, _draft_policy(drafter, model_runner), config.num_speculative_tokens)
    scheduler = Scheduler(kv_cache, limits, policy, speculator)
    # On a CPU the launching thread itself computes the step, so nothing can overlap. Ranks that do not sample
    # would not know the last step's ids.
    is_split = config.num_ranks > 1
    overlaps = config.overlap_steps and model_runner.device.type == "cuda" and not is_split
    model_runner.end_start()
    text_state = partial(TextStream, token_table)
    return Engine(
        scheduler,
        model_runner,
        text_state,
        overlaps=overlaps,
        grammars=model_runner.grammars,
        target_first_token_s=config.target_first_token_ms / 1000,
    )


def make_kv_cache(
    config: EngineConfig,
    groups: Sequence[KVGroupSpec],
    max_step_tokens: int,
    observer: CacheObserver | None = None,
) -> KVCacheManager:
    """Make the manager of the model runner's blocks.

    Args:
        config: the engine's configuration.
        groups: the model runner's KV groups.
        max_step_tokens: maximum number of tokens in a step.
        observer: is told of what comes to the prefix cache and goes from it.
    """
    windows = [group.window for group in groups]
    prefix_cache = None
    if config.enable_prefix_caching:
        prefix_cache = PrefixCache(config.block_size, windows=windows, observer=observer)
    return KVCacheManager(groups, config.block_size, prefix_cache, max_step_tokens=max_step_tokens)


def make_drafter(config: EngineConfig, model_runner: ModelRunner, kv_cache: KVCacheManager) -> Drafter | None:
    """Make the drafter that `config.drafter` names; None if it names none.

    Args:
        config: the engine's configuration.
        model_runner: the runner made from the same configuration.
        kv_cache: the manager of the model runner's blocks.
    """
    if model_runner.draft_runner is not None:
        slots = DraftSlots(kv_cache) if config.drafter == "draft_model" else None
        num_read = min(MAX_CAUGHT_UP_TOKENS, model_runner.token_budget.num_tokens)
        return ModelDrafter(model_runner.draft_runner, kv_cache, slots, num_read)
    if config.drafter == "suffix":
        return SuffixDrafter(config.max_shared_draft_tokens)
    return NGramDrafter() if config.drafter == "ngram" else None


def _draft_policy(drafter: Drafter | None, model_runner: ModelRunner) -> SpeculationPolicy:
    # Without a drafter only drafts sent by clients would use the measurements: not worth a slower start.
    step_cost = StepCost(_FLAT_COSTS) if drafter is None else model_runner.measure_step_costs().step_cost
    runner = model_runner.draft_runner
    pass_cost = None if runner is None else runner.measure_step_costs().step_cost
    return SpeculationPolicy(step_cost, pass_cost=pass_cost)
