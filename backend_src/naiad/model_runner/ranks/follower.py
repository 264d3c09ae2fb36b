"""`Follower`: computes one rank's part of every step, as the first rank tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner.device import kv_cache_codes, num_rank_threads, resolve_device, resolve_dtype
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.ranks.messages import (
    AllocatePool,
    ComputeLogits,
    ComputeStep,
    ComputeWithoutDrafts,
    ForgetSequences,
    RankMessage,
    StartRank,
    ZeroBlocks,
    ZeroSlots,
)
from naiad.model_runner.ranks.micro_batches import start_batches
from naiad.model_runner.sequence_states import SequenceStates, StateRow
from naiad.model_runner.step_inputs import build_step_inputs
from naiad.models import FamilyModel
from naiad.models.registry import load_part
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.staged_model import StagedModel
from naiad.sampling.row_state import RowState, new_row
from naiad.sequence import SamplingParams
from naiad_kernels.linear import LoadOptions


class Follower:
    """A rank's part of the model and of the KV cache."""

    def __init__(
        self, model: FamilyModel, config: EngineConfig, dtype: torch.dtype, place: Place, group: RankGroup
    ) -> None:
        """Compute with `model`; there is no KV pool yet.

        Args:
            model: the rank's part.
            config: the engine's configuration.
            dtype: the computation's dtype.
            place: the rank's.
            group: the ranks.
        """
        self._model = model
        self._staged = StagedModel(model, place, group, dtype) if place.stage.count > 1 else None
        self._config = config
        self._dtype = dtype
        self._group = group
        self._device = group.device
        groups = model.config.layer_groups
        layout = cache_layout(config, model.config, dtype, self._device)
        self._layouts = [replace(layout, window=each.window) for each in groups]
        self._states = SequenceStates(_NothingSampled(), range(len(groups)))
        self._pool = self._allocated([1] * len(groups))
        self._rows: dict[int, StateRow] = {}

    @classmethod
    def start(cls, message: StartRank) -> Follower:
        """Meet the other ranks and load the rank's part of the model.

        Raises:
            StartupError: the checkpoint or the machine is not suitable.
        """
        config = message.config
        place = Place.of(message.rank, config)
        device = resolve_device(config, message.rank)
        torch.set_num_threads(num_rank_threads(config))
        group = RankGroup(place, Path(message.store), device)
        dtype = resolve_dtype(config, device)
        target = ModelConfig.from_directory(config.model_dir)
        options = LoadOptions(dtype, device, packed=device.type == "cuda")
        model = load_part(config.model_dir, target, options, place, group)
        return cls(model, config, dtype, place, group)

    def handle(self, message: RankMessage) -> None:
        """Do what the first rank says."""
        match message:
            case ComputeStep(step):
                if step.block_copies:
                    self._pool.copy(step.block_copies)
                rows = self._states.take(step)
                self._rows = {each.row.sequence_id: each for each in rows}
                self._forward(rows)
            case ComputeWithoutDrafts(sequence_ids):
                self._forward([_without_drafts(self._rows[each]) for each in sequence_ids])
            case ComputeLogits(num_rows):
                self._compute_logits(num_rows)
            case ZeroBlocks(block_ids):
                self._pool.zero(block_ids)
            case ZeroSlots(slots):
                self._pool.zero_slots(slots)
            case ForgetSequences():
                self._states.clear()
            case AllocatePool(num_blocks):
                self._pool = self._allocated(num_blocks)
            case StartRank():
                raise AssertionError("the rank has started already")

    def _allocated(self, num_blocks: Sequence[int]) -> KVPool:
        codes = kv_cache_codes(self._config, self._dtype, self._device)
        block_size = self._config.block_size
        return KVPool(self._model.config, num_blocks, block_size, self._dtype, self._device, codes=codes)

    def _forward(self, rows: Sequence[StateRow]) -> None:
        if self._staged is not None:
            start_batches(self._staged, rows, self._layouts, self._pool.layers)
            self._staged.finish()
            return
        batch, _ = build_step_inputs(rows, self._layouts)
        self._model.forward(batch, self._pool.layers)

    def _compute_logits(self, num_rows: int) -> None:
        shape = (num_rows, self._model.config.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        own = self._model.logits(self._group.from_first(hidden))
        self._group.joined_at_first(own, self._model.config.vocab_size)


class _NothingSampled:
    """Makes sampling states for a rank that does not sample."""

    def new_row(self, sequence_id: int, params: SamplingParams, num_prompt_tokens: int) -> RowState:
        """Make a state that only counts tokens."""
        return new_row((), sequence_id, params, num_prompt_tokens)


def _without_drafts(row: StateRow) -> StateRow:
    return StateRow(msgspec.structs.replace(row.row, draft_token_ids=()), row.state)
