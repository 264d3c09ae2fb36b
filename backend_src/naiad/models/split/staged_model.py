"""`StagedModel`: one stage of a model; what its layers compute goes on to the next stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from naiad.config import ModelConfig
from naiad.models.decoder import FamilyModel, ForwardBatch
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup, Sending
from naiad.models.split.stage import Stage
from naiad_kernels.store_kv import LayerCache


class StageLayers(Protocol):
    """The layers of one stage.

    Attributes:
        dtype: of the hidden states that stages pass on.
    """

    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        """The stage's configuration."""

    def run(
        self, hidden: torch.Tensor | None, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            hidden: `[num_tokens, hidden_size]` of the stage before; None at the first stage.
            batch: the step; its token ids are used at the first stage only.
            caches: one for each layer of the stage.

        Returns:
            `[num_tokens, hidden_size]`, after the final norm at the last stage. Later runs do not change it.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits at the first stage; see `DecoderModel`."""


class TorchStage:
    """`StageLayers` that torch's ops compute."""

    def __init__(self, model: FamilyModel, stage: Stage, dtype: torch.dtype) -> None:
        """Run a part of a model.

        Args:
            model: has the stage's layers.
            stage: which one.
            dtype: in which the model computes.
        """
        self.dtype = dtype
        self._model = model
        self._stage = stage

    @property
    def config(self) -> ModelConfig:
        """The stage's configuration."""
        return self._model.config

    def run(
        self, hidden: torch.Tensor | None, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Run the layers; see `StageLayers`."""
        given = self._model.embed(batch.token_ids) if hidden is None else hidden
        normed, total = self._model.run_layers(given, batch, caches)
        return normed if self._stage.is_last else total

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits at the first stage; see `StageLayers`."""
        return self._model.logits(hidden)


class StagedModel:
    """A `DecoderModel` at the first rank; every other rank calls the same methods for the same batches.

    Several batches can be started before the first one is finished: while one stage computes a batch, the
    stage before it computes the next one.
    """

    def __init__(self, layers: StageLayers, place: Place, group: RankGroup) -> None:
        """Run a stage.

        Args:
            layers: the stage's.
            place: the rank's.
            group: has the other stages.
        """
        self._layers = layers
        self._place = place
        self._group = group
        self._sendings: list[Sending] = []
        # The number of tokens of each started batch.
        self._started: list[int] = []

    @property
    def config(self) -> ModelConfig:
        """The stage's configuration."""
        return self._layers.config

    @property
    def num_stages(self) -> int:
        """Number of stages, which is the largest number of batches that are computed at the same time."""
        return self._place.stage.count

    def start(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> None:
        """Run the stage's layers for a batch and pass the result on, without waiting until it is taken."""
        stage, num_tokens = self._place.stage, len(batch.positions)
        given = None if stage.is_first else self._group.from_previous(self._empty(num_tokens))
        hidden = self._layers.run(given, batch, caches)
        self._started.append(num_tokens)
        # The first rank needs the last stage's once: the parts have the same hidden states.
        if not stage.is_last or self._place.part.rank == 0:
            self._sendings.append(self._group.to_next(hidden))

    def finish(self) -> list[torch.Tensor]:
        """Wait until everything is sent and received that belongs to the batches started since the last call.

        Returns:
            At the first rank `[num_tokens, hidden_size]` after the final norm for each batch; at others [].
        """
        started, self._started = self._started, []
        results = []
        if self._place.rank == 0:
            results = [self._group.from_previous(self._empty(num_tokens)) for num_tokens in started]
        sendings, self._sendings = self._sendings, []
        for sending in sendings:
            sending.wait()
        return results

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all stages at the first rank; see `DecoderModel`."""
        self.start(batch, caches)
        return self.finish()[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits at a rank of the first stage; see `DecoderModel`."""
        return self._layers.logits(hidden)

    def _empty(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.config.hidden_size)
        return torch.empty(shape, dtype=self._layers.dtype, device=self._group.device)
