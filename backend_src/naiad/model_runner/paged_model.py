"""`PagedModel`: weights over a paged KV cache, and what they make of a step."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from naiad.config import ModelConfig
from naiad.errors import InternalError, NaiadError
from naiad.model_runner.context_logits import context_logits
from naiad.model_runner.graph_buckets import Buckets
from naiad.model_runner.graphed_model import Capture, GraphedModel
from naiad.model_runner.kv_pool import KVPool
from naiad.model_runner.step_costs import MeasuredCosts, measure_step_costs, probed_blocks
from naiad.model_runner.step_inputs import StepRows, build_step_inputs, sampled_places
from naiad.models import LlamaModel
from naiad.outputs import ModelOutput, ScheduledSequence, SchedulerOutput
from naiad.sampling.sampler import Sampler
from naiad.sampling.verification import sampled_views, verify
from naiad_kernels.paged_attention.layout import CacheLayout

_NOT_FINITE = "the model computed numbers that are not finite for this request"


class PagedModel:
    """Computes steps of one model.

    Attributes:
        model_config: the checkpoint's shape.
        max_model_len: tokens of prompt and output together, at most.
    """

    def __init__(self, model: LlamaModel, pool: KVPool, layout: CacheLayout, max_model_len: int) -> None:
        """Join the parts.

        Args:
            model: on the layout's device, in its dtype.
            pool: a cache for each of the model's layers.
            layout: of the pool.
            max_model_len: no longer is any sequence.
        """
        self.model_config: ModelConfig = model.config
        self.max_model_len = max_model_len
        self._model = model
        self._pool = pool
        self._layout = layout
        self._sampler = Sampler(model.config.vocab_size)
        self._graphs: GraphedModel | None = None

    @torch.inference_mode()
    def capture_graphs(self, buckets: Buckets, capture: Capture) -> None:
        """From now on replay steps that fit a bucket."""
        self._graphs = GraphedModel(self._model, self._pool.layers, self._layout, buckets, capture)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> ModelOutput:
        """Compute one step.

        Returns:
            A token for every sequence with `samples`, or an error for every sequence whose
            numbers are not finite or to which no token is possible; the others are untouched by
            it. No draft makes a row fail. Log-probabilities and logits for sequences that ask
            for them.
        """
        if not output.scheduled:
            return ModelOutput({})
        self._pool.copy(output.block_copies)
        inputs, hidden = self._forward(output)
        errors = _rows_not_finite(hidden, inputs)
        context = context_logits(inputs, hidden, self._model.logits, errors)
        sampled = self._sample(inputs, hidden, errors)
        result = replace(sampled, errors={**errors, **sampled.errors}, context_logits=context)
        failed = [row for row in inputs.rows if row.draft_token_ids and row.sequence.sequence_id in errors]
        if failed:
            self._run_without_drafts(failed, result)
        return result

    def _forward(self, output: SchedulerOutput) -> tuple[StepRows, torch.Tensor]:
        replayed = self._graphs.forward(output) if self._graphs is not None else None
        if replayed is not None:
            return replayed
        batch, rows = build_step_inputs(output, self._layout)
        return rows, self._model.forward(batch, self._pool.layers)

    def _run_without_drafts(self, rows: list[ScheduledSequence], result: ModelOutput) -> None:
        """Compute failed rows again: what is not finite may come from a draft.

        Attention multiplies what it masks by 0, so the known tokens before a draft may show it too.
        """
        size = self._layout.block_size
        known_rows = []
        for row in rows:
            num_known, table = row.num_scheduled_tokens - len(row.draft_token_ids), row.sequence.block_table
            places = range(row.start + num_known, row.start + row.num_scheduled_tokens)
            self.clear_slots([table[place // size] * size + place % size for place in places])
            known_rows.append(replace(row, num_scheduled_tokens=num_known, draft_token_ids=()))
            del result.errors[row.sequence.sequence_id]
        again = self.run(SchedulerOutput(known_rows))
        for field in fields(ModelOutput):
            getattr(result, field.name).update(getattr(again, field.name))

    def _sample(self, inputs: StepRows, hidden: torch.Tensor, errors: dict[int, NaiadError]) -> ModelOutput:
        """New tokens of the rows that sample and have not failed."""
        rows = [row for row in inputs.rows if row.samples and row.sequence.sequence_id not in errors]
        if not rows:
            return ModelOutput({})
        places = inputs.sampled_places
        if errors:
            kept = sampled_places(inputs.rows, inputs.ends, errors)
            places = torch.tensor(kept, device=self._layout.device)
        logits = self._model.logits(hidden.index_select(0, places))
        views = sampled_views(rows)
        sampled = self._sampler.sample(logits, [view for row_views in views for view in row_views])
        return verify(rows, views, sampled)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: list[int]) -> None:
        """Set KV blocks to 0: their keys or values may not be finite, and somebody will get them."""
        if block_ids:
            self._pool.zero(block_ids)

    @torch.inference_mode()
    def clear_slots(self, slots: list[int]) -> None:
        """Set single slots to 0, block × block_size + offset each."""
        self._pool.zero_slots(slots)

    def measure_step_costs(self) -> MeasuredCosts:
        """Time steps; takes some seconds on a CPU."""
        is_cuda = self._layout.device.type == "cuda"
        costs = measure_step_costs(self.run, self.max_model_len, self._layout.block_size, is_cuda=is_cuda)
        self.clear_blocks(probed_blocks(self.max_model_len, self._layout.block_size))
        return costs


def _rows_not_finite(hidden: torch.Tensor, inputs: StepRows) -> dict[int, NaiadError]:
    """Sequences with a token whose hidden state is not finite, sampled from or not."""
    if bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
        return {}
    is_finite = torch.isfinite(hidden).all(dim=1).tolist()
    errors: dict[int, NaiadError] = {}
    start = 0
    for end, row in zip(inputs.ends, inputs.rows, strict=True):
        if not all(is_finite[start:end]):
            errors[row.sequence.sequence_id] = InternalError(_NOT_FINITE)
        start = end
    return errors
