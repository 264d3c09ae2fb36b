"""`NativeStage`: one stage of a model, whose layers are recorded once and run by the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from naiad.config import ModelConfig
from naiad.models.decoder import FamilyModel, ForwardBatch
from naiad.models.native_model import traced_batch
from naiad.models.split.stage import Stage
from naiad_kernels.native.library import Team
from naiad_kernels.native.recorder import TapeRecorder
from naiad_kernels.native.tape import Tape
from naiad_kernels.store_kv import LayerCache


class NativeStage:
    """`StageLayers` on a CPU. Each token's bits are those of the whole model in one process.

    Attributes:
        config: the stage's.
        dtype: of hidden states, in whatever dtype their products are.
    """

    dtype = torch.float32

    def __init__(
        self, model: FamilyModel, stage: Stage, caches: Sequence[LayerCache], dtype: torch.dtype, team: Team
    ) -> None:
        """Record the stage's layers over its caches, and the logits if it is the first stage.

        Args:
            model: has the stage's layers; its linear weights are native ones.
            stage: which one.
            caches: one for each layer, laid out for the native kernels; no others can be used later.
            dtype: in which the model computes.
            team: computes the steps.

        Raises:
            NotRecordableError: the layers do something that has no record.
        """
        self.config: ModelConfig = model.config
        self._caches = caches
        recorder = TapeRecorder(dtype)
        batch = traced_batch(recorder, model.config)
        rows = recorder.rows(model.config.hidden_size) if not stage.is_first else None
        given = model.embed(batch.token_ids) if rows is None else cast(Any, rows)
        normed, total = model.run_layers(given, batch, caches)
        self._layers = Tape(recorder.finish(cast(Any, normed if stage.is_last else total)), team)
        self._logits: Tape | None = None
        if stage.is_first:
            recorder = TapeRecorder()
            logits = model.logits(cast(Any, recorder.rows(model.config.hidden_size)))
            self._logits = Tape(recorder.finish(cast(Any, logits)), team)

    def run(
        self, hidden: torch.Tensor | None, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Run the layers; see `StageLayers`."""
        assert caches is self._caches, "the stage was recorded over other caches"
        tables = [group.attention.tables for group in batch.groups]
        assert all(each is not None for each in tables), "the step is not laid out for the native kernels"
        token_ids = batch.token_ids if hidden is None else None
        inputs = [] if hidden is None else [hidden]
        num_tokens = len(batch.positions)
        made = self._layers.run(num_tokens, token_ids, batch.positions, cast(Any, tables), inputs)
        # The next batch is computed while this one is still being sent.
        return made.clone(memory_format=torch.contiguous_format)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits at the first stage, valid until the next call; see `StageLayers`."""
        assert self._logits is not None, "the head is at the first stage"
        return self._logits.run(len(hidden), inputs=[hidden])
