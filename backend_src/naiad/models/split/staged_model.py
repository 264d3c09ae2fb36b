"""`StagedModel`: the layers of one stage; what they compute goes on to the next stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from naiad.config import ModelConfig
from naiad.models.decoder import FamilyModel, ForwardBatch
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup, Sending
from naiad_kernels.store_kv import LayerCache


class StagedModel:
    """A `DecoderModel` at the first rank; every other rank calls the same methods for the same batches.

    Several batches can be started before the first one is finished: while one stage computes a batch, the
    stage before it computes the next one.
    """

    def __init__(self, model: FamilyModel, place: Place, group: RankGroup, dtype: torch.dtype) -> None:
        """Run a stage.

        Args:
            model: the stage's layers.
            place: the rank's.
            group: has the other stages.
            dtype: the dtype of hidden states.
        """
        self._model = model
        self._place = place
        self._group = group
        self._dtype = dtype
        self._sendings: list[Sending] = []
        # The number of tokens of each started batch.
        self._started: list[int] = []

    @property
    def config(self) -> ModelConfig:
        """The stage's configuration."""
        return self._model.config

    @property
    def num_stages(self) -> int:
        """Number of stages, which is the largest number of batches that are computed at the same time."""
        return self._place.stage.count

    def start(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> None:
        """Run the stage's layers for a batch and pass the result on, without waiting until it is taken."""
        stage, num_tokens = self._place.stage, len(batch.positions)
        if stage.is_first:
            hidden = self._model.embed(batch.token_ids)
        else:
            hidden = self._group.from_previous(self._empty(num_tokens))
        normed, hidden = self._model.run_layers(hidden, batch, caches)
        self._started.append(num_tokens)
        if not stage.is_last:
            self._sendings.append(self._group.to_next(hidden))
        elif self._place.part.rank == 0:
            # The first rank needs it once: at the last stage the parts' hidden states are the same.
            self._sendings.append(self._group.to_next(normed))

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
        return self._model.logits(hidden)

    def _empty(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.config.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._group.device)
