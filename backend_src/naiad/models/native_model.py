"""`NativeModel`: a model whose steps are recorded once and run by the native kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from naiad.config import ModelConfig
from naiad.models.decoder import DecoderModel, ForwardBatch, GroupInputs
from naiad.models.native_picker import NativePicker, record_pick
from naiad_kernels.best_tokens import BestTokens
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.native.library import Kind, Team
from naiad_kernels.native.recorder import TapeRecorder, TracedGroup
from naiad_kernels.native.tape import Tape
from naiad_kernels.store_kv import LayerCache


class NativeModel:
    """A `DecoderModel` on a CPU that computes as another one describes.

    Attributes:
        config: the model's.
        pick: finds best tokens and draws from logits that processors have changed.
    """

    def __init__(
        self, model: DecoderModel, caches: Sequence[LayerCache], dtype: torch.dtype, team: Team
    ) -> None:
        """Record the model's forward pass over its caches, and its logits.

        Args:
            model: its linear weights are native ones.
            caches: one for each layer, laid out for the native kernels; no others can be used later.
            dtype: in which the model computes.
            team: computes the steps.

        Raises:
            NotRecordableError: the forward pass does something that has no record.
        """
        self.config: ModelConfig = model.config
        self._model = model
        self._caches = caches
        recorder = TapeRecorder(dtype)
        hidden = cast(Any, model.forward(traced_batch(recorder, model.config), caches))
        self._forward = Tape(recorder.finish(hidden), team)
        recorder = TapeRecorder()
        logits = cast(Any, model.logits(cast(Any, recorder.rows(model.config.hidden_size))))
        record_pick(logits)
        self._logits = Tape(recorder.finish(logits), team)
        recorder = TapeRecorder(dtype)
        hidden = cast(Any, model.forward(traced_batch(recorder, model.config), caches))
        logits = cast(Any, model.logits(hidden))
        record_pick(logits)
        self._whole = Tape(recorder.finish(logits), team)
        self.pick = NativePicker(model.config.vocab_size, team)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers, as `DecoderModel` describes.

        Returns:
            `[num_tokens, hidden_size]` float32, valid until the next call.
        """
        return self._run(self._forward, batch, caches)

    def _run(
        self,
        tape: Tape,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        best: BestTokens | None = None,
        allowed: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        assert caches is self._caches, "the model was recorded over other caches"
        tables = [group.attention.tables for group in batch.groups]
        assert all(each is not None for each in tables), "the step is not laid out for the native kernels"
        # `len` of a tensor takes twice as long after a step.
        return tape.run(
            batch.token_ids.shape[0],
            batch.token_ids,
            batch.positions,
            cast(Any, tables),
            best=best,
            allowed=allowed,
            draws=draws,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, hidden_size]` of `forward` to `[num_rows, vocab_size]`, valid until the next call."""
        return self._logits.run(len(hidden), inputs=[hidden])

    def logits_and_best(
        self, hidden: torch.Tensor, draws: Draws | None = None, allowed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, BestTokens]:
        """Compute `logits`, and in the same call each row's best token and the one that it draws.

        Args:
            hidden: as for `logits`.
            draws: how rows draw, and room for their tokens; None: no row does.
            allowed: the bitmask of `best_tokens`, which leaves the logits as they are; None: all tokens are
                allowed.
        """
        best = BestTokens.empty(len(hidden))
        return self._logits.run(len(hidden), inputs=[hidden], best=best, allowed=allowed, draws=draws), best

    def whole_step(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        draws: Draws | None = None,
        allowed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, BestTokens]:
        """Compute `forward` and `logits_and_best` of all its rows in one call.

        If a row of `forward` is not finite, its best logit is a NaN: the last norm makes NaNs of what is not
        finite, and a product with a NaN is one.

        Between two calls Python would find little of what it needs in the caches of the core: the weights
        have passed through them.
        """
        best = BestTokens.empty(batch.token_ids.shape[0])
        return self._run(self._whole, batch, caches, best, allowed, draws), best

    @contextmanager
    def profiled(self) -> Iterator[Counter[Kind]]:
        """Count the nanoseconds that records of each kind take meanwhile; filled at the end."""
        found: Counter[Kind] = Counter()
        tapes = (self._forward, self._logits, self._whole)
        with ExitStack() as stack:
            counters = [stack.enter_context(tape.profiled()) for tape in tapes]
            yield found
        for counter in counters:
            found.update(counter)


def traced_batch(recorder: TapeRecorder, config: ModelConfig) -> ForwardBatch:
    """Stand in for a step of a model with this configuration, to be written down by a recorder."""
    return ForwardBatch(
        cast(Any, recorder.token_ids()),
        cast(Any, recorder.positions()),
        [_traced(index, group.window or 0) for index, group in enumerate(config.layer_groups)],
    )


def _traced(index: int, window: int) -> GroupInputs:
    group = cast(Any, TracedGroup(index, window))
    return GroupInputs(slots=group, attention=group)
