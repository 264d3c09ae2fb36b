"""`ModelRunner` loads the served model, and perhaps a draft model, and computes their steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError, StartupError
from naiad.grammar import Grammars
from naiad.model_runner.device import (
    check_memory,
    compile_count,
    kv_cache_codes,
    memory_use,
    num_rank_threads,
    resolve_device,
    resolve_dtype,
)
from naiad.model_runner.draft_choice import (
    chosen_drafter,
    draft_model_config,
    num_draft_layers,
    quantizations,
)
from naiad.model_runner.graph_buckets import Buckets
from naiad.model_runner.graphed_model import cuda_capture
from naiad.model_runner.kept_measurements import Facts, KeptMeasurements
from naiad.model_runner.kv_pool import KVPool, cache_layout, kv_group_specs
from naiad.model_runner.native_kernels import native_team
from naiad.model_runner.paged_model import PagedModel
from naiad.model_runner.pool_size import CudaMemory, default_cpu_bytes, measured_bytes
from naiad.model_runner.ranks.followers import Followers
from naiad.model_runner.ranks.messages import AllocatePool, EndStart
from naiad.model_runner.rehearsal import every_kind_of_step, largest_steps
from naiad.model_runner.token_budget import (
    CUDA_BUDGET,
    MAX_BUDGET_TOKENS,
    TokenBudget,
    measure_token_budget,
    probe_steps,
)
from naiad.models import DecoderModel, load_model
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.large_pages import LargePages, has_large_pages
from naiad.models.native_model import NativeModel
from naiad.models.split.part import check_can_split, part_configs
from naiad.models.split.place import Place
from naiad.outputs import MemoryUse
from naiad_kernels.linear import LoadOptions
from naiad_kernels.linear.quantised.weights import DISTINCT_ROWS
from naiad_kernels.native.library import Team
from naiad_kernels.paged_attention.device_step import max_short_len
from naiad_kernels.paged_attention.layout import CacheLayout

_LOG = logging.getLogger(__name__)


class ModelRunner(PagedModel):
    """Runs steps of one checkpoint on one device, with an optional draft model.

    Attributes:
        model_config: the checkpoint's configuration.
        dtype, device: the computation's dtype and device.
        kv_groups: the KV groups and the sizes of their pools.
        max_model_len: maximum tokens of prompt and output together.
        drafter: where draft tokens come from: the configuration's, with "auto" resolved.
        draft_runner: the draft model, with a cache of the same block ids; None: no model drafts.
        token_budget: the budget of a step.
        grammars: compiles the grammars of requests.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the models, size the KV pools, choose the token budget.

        Raises:
            ConfigError: this machine or checkpoint does not support a setting.
            ModelError: a checkpoint is missing, damaged or not supported.
            StartupError: too little memory.
        """
        target = ModelConfig.from_directory(config.model_dir)
        check_can_split(config, target)
        self._target = target
        self._place = Place.of(0, config)
        draft = draft_model_config(config, target)
        num_layers = num_draft_layers(config, target)
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        num_threads = num_rank_threads(config)
        torch.set_num_threads(num_threads)
        checkpoints = [(config.model_dir, target)]
        if draft is not None:
            checkpoints.append((config.draft_model, draft))
        check_memory(checkpoints, quantizations(config), self.dtype, self.device, config.num_ranks)
        with torch.inference_mode():
            self._team = team = native_team(config, self.device, self.dtype, num_threads)
            self._codes = kv_cache_codes(config, self.dtype, self.device)
            self._is_native = team is not None
            self.drafter = chosen_drafter(config, self._is_native)
            options = [self._load_options(config, kind) for kind in quantizations(config)]
            caches = [self._start_cache(config, each) for each, _ in checkpoints]
            self._pages = pages = LargePages()
            self._followers: Followers | None = None
            if config.num_ranks > 1:
                self._followers = Followers(config, self._place, self.device, self._is_native)
                models = [self._followers.load(config.model_dir, target, options[0])]
            else:
                models = _load_models(
                    checkpoints, caches, options, num_layers, pages if self._has_large_pages(config) else None
                )
            num_bytes = self._choose_kv_cache_bytes(config, models, target, pages.num_reserved_bytes)
            pools = self._allocate_pools(config, models[: len(checkpoints)], target, num_bytes, pages)
            if num_layers:
                pools.append(pools[0].first_layers(num_layers))
            if team is not None:
                models = self._recorded(models, pools, team)
        longest = self._longest_served(config, target)
        facts: Facts = {
            "dtype": str(self.dtype),
            "num_threads": num_threads,
            "num_parts": config.tensor_parallel_size,
            "num_stages": config.pipeline_parallel_size,
            "kv_cache_dtype": str(self._codes or self.dtype),
            "large_pages": int(self._has_large_pages(config)),
            "kernels": f"torch {torch.__version__}" if team is None else team.library.name,
        }
        measurements = [
            KeptMeasurements(cache, {**facts, "quantization": own.quantization}, pages.wait)
            for cache, own in zip(caches, options, strict=True)
        ]
        layout = self._cache_layout(config, models[0].config)
        self.grammars = Grammars(config.model_dir, target.vocab_size, target.eos_token_ids)
        super().__init__(
            models[0],
            pools[0],
            layout,
            longest,
            measurements=measurements[0],
            grammars=self.grammars,
            followers=self._followers,
        )
        self.draft_runner: PagedModel | None = None
        if len(models) == 2:
            layout = self._cache_layout(config, models[1].config)
            # The target's first layers use the target's groups; a draft model uses the first group only.
            kv_groups = [] if num_layers else [0] * len(models[1].config.layer_groups)
            self.draft_runner = PagedModel(
                models[1], pools[1], layout, longest, kv_groups, measurements[-1], self.grammars
            )
            self._capture_graphs(config, self.draft_runner)
        self._capture_graphs(config, self)
        self.token_budget = self._choose_budget(config)
        self._count_compiles: Callable[[], int] = lambda: 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first KV group."""
        return self.kv_groups[0].num_blocks

    def end_start(self) -> None:
        """End startup: kernels that are compiled from now on count as late, and threads make room for others.

        What is measured before, such as the cost of a step, holds for all threads.
        """
        if self._team is not None:
            self._team.adapt(True)
            if self._followers is not None:
                self._followers.tell(EndStart())
        self._count_compiles = compile_count(self.device)

    @property
    def num_late_compiles(self) -> int:
        """Number of kernels that were compiled after startup, while requests waited; it should be 0."""
        return self._count_compiles()

    def close(self) -> None:
        """End the other ranks of a split model; the runner computes nothing afterwards."""
        self._pages.stop()
        if self._followers is not None:
            # NCCL ends only when no graph has its exchanges inside.
            self._graphs = None
            self._followers.close()

    def memory_use(self) -> MemoryUse:
        """Return the memory that the process holds now."""
        return memory_use(self.device)

    def _has_large_pages(self, config: EngineConfig) -> bool:
        return config.large_pages and self._is_native and has_large_pages()

    def _load_options(self, config: EngineConfig, quantization: str) -> LoadOptions:
        return LoadOptions(
            self.dtype,
            self.device,
            config.batch_invariant,
            self._is_native,
            quantization,
            packed=self.device.type == "cuda" and not config.batch_invariant,
        )

    def _longest_served(self, config: EngineConfig, target: ModelConfig) -> int:
        """The maximum length of a sequence: all its blocks must fit in the pool."""
        limit = target.max_position_embeddings
        longest = min(config.max_model_len or limit, limit)
        wanted = config.max_model_len or limit
        for group in self.kv_groups:
            if group.window is None:
                longest = min(longest, group.num_blocks * config.block_size)
        if longest < wanted:
            why = "the checkpoint has no more" if longest == limit else "the KV cache holds no more"
            asked = f"max_model_len = {wanted}" if config.max_model_len else f"the checkpoint's {wanted}"
            _LOG.warning("a sequence has at most %d tokens, fewer than %s: %s", longest, asked, why)
        return longest

    def _allocate_pools(
        self,
        config: EngineConfig,
        models: list[DecoderModel],
        target: ModelConfig,
        kv_cache_bytes: int,
        pages: LargePages,
    ) -> list[KVPool]:
        """Allocate a pool for each model. All layers of a draft model use blocks of the first KV group.

        Args:
            config: the engine's configuration.
            models: the served model, or this process's stage of it, and perhaps a draft model.
            target: the configuration of the whole served model.
            kv_cache_bytes: memory for all stages and models, of this process's part of every layer.
            pages: provides large pages on a CPU.
        """
        shapes = [model.config for model in models]
        max_step_tokens = max(config.max_num_batched_tokens or MAX_BUDGET_TOKENS, config.max_num_seqs)
        # All stages have the same block ids.
        whole = [self._place.part.config(target), *shapes[1:]]
        self.kv_groups = kv_group_specs(
            config, whole, self.dtype, kv_cache_bytes, max_step_tokens, self._codes
        )
        counts = [group.num_blocks for group in self.kv_groups]
        if self._followers is not None:
            self._followers.tell(AllocatePool(counts))
        block_counts = [counts, *([counts[0]] * len(each.layer_groups) for each in shapes[1:])]
        try:
            return [
                KVPool(
                    each,
                    counts,
                    config.block_size,
                    self.dtype,
                    self.device,
                    self._is_native,
                    self._codes,
                    pages,
                )
                for each, counts in zip(shapes, block_counts, strict=True)
            ]
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                "kv_cache_bytes", kv_cache_bytes, f"a size that fits in memory ({error})"
            ) from error

    def _recorded(self, models: list[DecoderModel], pools: list[KVPool], team: Team) -> list[DecoderModel]:
        """Record the models, or this process's stage of one, over their pools."""
        # Torch's own threads would spin on the cores that the team needs.
        torch.set_num_threads(1)
        if self._followers is not None:
            self._followers.record(pools[0].layers, self.dtype, team)
            return models
        with_pools = zip(models, pools, strict=True)
        return [NativeModel(model, pool.layers, self.dtype, team) for model, pool in with_pools]

    def _choose_kv_cache_bytes(
        self, config: EngineConfig, models: list[DecoderModel], target: ModelConfig, num_reserved_bytes: int
    ) -> int:
        """Choose the size of the KV cache of all stages, for this process's part of every layer."""
        part, stage = self._place.part, self._place.stage
        if self.device.type == "cpu":
            num_bytes = config.kv_cache_bytes or default_cpu_bytes(num_reserved_bytes)
            return part.kv_cache_bytes(target, num_bytes)
        rehearsal = partial(self._rehearse, config, models)
        try:
            if config.kv_cache_bytes:
                rehearsal()
                return part.kv_cache_bytes(target, config.kv_cache_bytes)
            own = measured_bytes(CudaMemory(self.device), config.kv_cache_memory_fraction, rehearsal)
            return int(own / stage.largest_share(target))
        except torch.OutOfMemoryError as error:
            raise StartupError(
                "the largest step does not fit in the GPU's memory together with the weights: lower "
                f"max_num_batched_tokens or max_num_seqs, or free memory ({error})"
            ) from error

    def _rehearse(self, config: EngineConfig, models: list[DecoderModel]) -> list[PagedModel]:
        """Compute every kind of step and the largest steps of each model, over a pool of one block.

        Returns:
            The models with graphs, which hold the memory that graphs take.
        """
        graphed: list[PagedModel] = []
        eager: list[PagedModel] = []
        for model in models:
            limit = model.config.max_position_embeddings
            longest = min(config.max_model_len or limit, limit)
            num_blocks = [1] * len(model.config.layer_groups)
            pool = KVPool(
                model.config, num_blocks, config.block_size, self.dtype, self.device, codes=self._codes
            )
            layout = self._cache_layout(config, model.config)
            graphed.append(PagedModel(model, pool, layout, longest, followers=self._followers))
            self._capture_graphs(config, graphed[-1])
            eager.append(PagedModel(model, pool, layout, longest, followers=self._followers))
        num_tokens = max(config.max_num_batched_tokens or CUDA_BUDGET.num_tokens, config.max_num_seqs)
        is_rounded = set(quantizations(config)) != {"none"}
        # Run after all captures, because each capture first releases the memory that torch has cached.
        for paged_model, model in zip(eager, models, strict=True):
            layout = self._cache_layout(config, model.config)
            longest = paged_model.max_model_len
            rows = DISTINCT_ROWS if is_rounded or model.config.quantised is not None else ()
            steps = every_kind_of_step(layout, longest, rows)
            for step in steps + largest_steps(config, num_tokens, longest):
                paged_model.run(step)
        return graphed

    def _capture_graphs(self, config: EngineConfig, paged_model: PagedModel) -> None:
        has_ranks = self._followers is not None
        # A step passes through stages in pieces, whose sends wait for each other.
        is_whole = self._followers is None or self._followers.staged is None
        if self.device.type == "cuda" and config.cuda_graphs and is_whole:
            num_drafts = config.num_speculative_tokens if self.drafter != "none" else 0
            longest = paged_model.max_model_len
            # Every rank captures the same sizes, and one may have more query heads for a KV head than others.
            configs = (
                part_configs(self._target, self._place.part.size) if has_ranks else [paged_model.model_config]
            )
            short_lens = [max_short_len(self._cache_layout(config, each)) for each in configs]
            query_len = min(1 + num_drafts, longest, *short_lens)
            buckets = Buckets.of(config.max_num_seqs, query_len, longest)
            paged_model.capture_graphs(buckets, cuda_capture(has_ranks))

    def _cache_layout(self, config: EngineConfig, model_config: ModelConfig) -> CacheLayout:
        return cache_layout(config, model_config, self.dtype, self.device, self._is_native)

    def _choose_budget(self, config: EngineConfig) -> TokenBudget:
        if config.max_num_batched_tokens:
            return TokenBudget(config.max_num_batched_tokens)
        if self.device.type == "cuda":
            return CUDA_BUDGET
        return self._measured("token_budget", TokenBudget, partial(self._measure_budget, config.block_size))

    def _measure_budget(self, block_size: int) -> TokenBudget:
        short, long = probe_steps(self._longest_probe, block_size)
        budget = measure_token_budget(self.run, short, long)
        self._end_probes()
        return budget

    def _start_cache(self, config: EngineConfig, model_dir: str) -> CheckpointCache | None:
        return CheckpointCache(model_dir) if config.start_cache and self.device.type == "cpu" else None


def _load_models(
    checkpoints: Sequence[tuple[str, ModelConfig]],
    caches: Sequence[CheckpointCache | None],
    options: Sequence[LoadOptions],
    num_draft_layers: int,
    pages: LargePages | None,
) -> list[DecoderModel]:
    """Load the checkpoints; with `num_draft_layers` the first one's first layers are one more model."""
    loaded = [
        load_model(directory, shape, own, cache, pages)
        for (directory, shape), own, cache in zip(checkpoints, options, caches, strict=True)
    ]
    if num_draft_layers:
        loaded.append(loaded[0].first_layers(num_draft_layers))
    return [*loaded]
