"""`Follower`: computes one rank's part of every step, as the first rank tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import StartupError
from naiad.model_runner.device import kv_cache_codes, num_rank_threads, resolve_device, resolve_dtype
from naiad.model_runner.graphed_model import Capture, GraphedModel, cuda_capture
from naiad.model_runner.kv_pool import KVPool, cache_layout
from naiad.model_runner.native_kernels import native_team
from naiad.model_runner.ranks.messages import (
    AllocatePool,
    CaptureGraphs,
    ComputeLogits,
    ComputeStep,
    ComputeWithoutDrafts,
    EndStart,
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
from naiad.models.native_stage import NativeStage
from naiad.models.registry import load_part
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.staged_model import StagedModel, StageLayers, TorchStage
from naiad.sampling.row_state import RowState, new_row
from naiad.sequence import SamplingParams
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.library import Team


class Follower:
    """A rank's part of the model and of the KV cache."""

    def __init__(
        self,
        model: FamilyModel,
        config: EngineConfig,
        dtype: torch.dtype,
        place: Place,
        group: RankGroup,
        team: Team | None,
        capture: Capture | None = None,
    ) -> None:
        """Compute with `model`; the KV pool has one block.

        Args:
            model: the rank's part.
            config: the engine's configuration.
            dtype: the computation's dtype.
            place: the rank's.
            group: the ranks.
            team: computes the steps; None: torch's ops do.
            capture: captures a graph; None: a CUDA graph.
        """
        self._model = model
        self._capture = capture
        self._config = config
        self._dtype = dtype
        self._place = place
        self._group = group
        self._team = team
        self._device = group.device
        groups = model.config.layer_groups
        layout = cache_layout(config, model.config, dtype, self._device, team is not None)
        self._layouts = [replace(layout, window=each.window) for each in groups]
        self._states = SequenceStates(_NothingSampled(), range(len(groups)))
        self._rows: dict[int, StateRow] = {}
        self._graphs: GraphedModel | None = None
        self._allocate([1] * len(groups))

    @classmethod
    def start(cls, message: StartRank) -> Follower:
        """Meet the other ranks and load the rank's part of the model.

        Raises:
            StartupError: the checkpoint or the machine is not suitable.
        """
        config = message.config
        place = Place.of(message.rank, config)
        device = resolve_device(config, message.rank)
        num_threads = num_rank_threads(config)
        torch.set_num_threads(num_threads)
        group = RankGroup(place, Path(message.store), device)
        dtype = resolve_dtype(config, device)
        team = _native_team(config, device, dtype, num_threads) if message.is_native else None
        target = ModelConfig.from_directory(config.model_dir)
        options = LoadOptions(
            dtype,
            device,
            native=team is not None,
            quantization=config.quantization,
            packed=device.type == "cuda",
        )
        model = load_part(config.model_dir, target, options, place, group)
        if team is not None:
            # Torch's own threads would spin on the cores that the team needs.
            torch.set_num_threads(1)
        return cls(model, config, dtype, place, group, team)

    def handle(self, message: RankMessage) -> None:
        """Do what the first rank says."""
        match message:
            case ComputeStep() | ComputeWithoutDrafts() | ComputeLogits():
                self._compute(message)
            case ZeroBlocks(block_ids):
                self._pool.zero(block_ids)
            case ZeroSlots(slots):
                self._pool.zero_slots(slots)
            case ForgetSequences():
                self._states.clear()
            case AllocatePool(num_blocks):
                self._allocate(num_blocks)
            case CaptureGraphs(buckets):
                capture = self._capture or cuda_capture(has_ranks=True)
                self._graphs = GraphedModel(self._model, self._pool.layers, self._layouts, buckets, capture)
            case EndStart():
                if self._team is not None:
                    self._team.adapt(True)
            case StartRank():
                raise AssertionError("the rank has started already")

    def _compute(self, message: ComputeStep | ComputeWithoutDrafts | ComputeLogits) -> None:
        match message:
            case ComputeStep(step, replays):
                if step.block_copies:
                    self._pool.copy(step.block_copies)
                rows = self._states.take(step)
                self._rows = {each.row.sequence_id: each for each in rows}
                self._forward(rows, replays)
            case ComputeWithoutDrafts(sequence_ids, replays):
                self._forward([_without_drafts(self._rows[each]) for each in sequence_ids], replays)
            case ComputeLogits(num_rows):
                self._compute_logits(num_rows)

    def _allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the KV pool, and the stage that computes with it."""
        self._graphs = None
        codes = kv_cache_codes(self._config, self._dtype, self._device)
        model, dtype, stage = self._model, self._dtype, self._place.stage
        is_native = self._team is not None
        self._pool: KVPool = KVPool(
            model.config, num_blocks, self._config.block_size, dtype, self._device, is_native, codes
        )
        self._staged: StagedModel | None = None
        if stage.count > 1:
            layers: StageLayers = TorchStage(model, stage, dtype)
            if self._team is not None:
                layers = NativeStage(model, stage, self._pool.layers, dtype, self._team)
            self._staged = StagedModel(layers, self._place, self._group)

    def _forward(self, rows: list[StateRow], replays: bool) -> None:
        if replays:
            assert self._graphs is not None, "the first rank has captured graphs"
            if self._graphs.forward(rows) is not None:
                return
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


def _native_team(config: EngineConfig, device: torch.device, dtype: torch.dtype, num_threads: int) -> Team:
    """The threads that compute this rank's steps natively, as the first rank's do."""
    team = native_team(config, device, dtype, num_threads)
    if team is None:
        raise StartupError("a rank has no native kernels, which compute the first rank's steps")
    return team


def _without_drafts(row: StateRow) -> StateRow:
    return StateRow(msgspec.structs.replace(row.row, draft_token_ids=()), row.state)
