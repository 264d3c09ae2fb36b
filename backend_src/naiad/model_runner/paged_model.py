"""`PagedModel`: computes steps of a model over its paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import torch

from naiad.config import ModelConfig
from naiad.errors import InternalError, NaiadError
from naiad.grammar import Grammars
from naiad.kv_cache.slots import slots_of
from naiad.model_runner.graph_buckets import Buckets
from naiad.model_runner.graphed_model import Capture, GraphedModel
from naiad.model_runner.inference_mode import in_inference_mode
from naiad.model_runner.kept_measurements import KeptMeasurements
from naiad.model_runner.kv_pool import KVPool
from naiad.model_runner.prompt_details import PromptDetails, prompt_details
from naiad.model_runner.ranks.followers import Followers
from naiad.model_runner.ranks.messages import (
    CaptureGraphs,
    ComputeStep,
    ComputeWithoutDrafts,
    ForgetSequences,
    RankMessage,
    ZeroBlocks,
    ZeroSlots,
)
from naiad.model_runner.ranks.micro_batches import forward_batches
from naiad.model_runner.sequence_states import SequenceStates, StateRow
from naiad.model_runner.step_costs import MeasuredCosts, measure_step_costs
from naiad.model_runner.step_inputs import SampledIds, StepRows, build_step_inputs
from naiad.model_runner.token_budget import probed_blocks
from naiad.models import DecoderModel
from naiad.models.native_model import NativeModel
from naiad.outputs import ModelOutput, StepBatch
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import QueuedSample, Sampler
from naiad.sampling.sampler_output import SamplerOutput
from naiad.sampling.verification import sampled_views, verify
from naiad.sequence import SamplingParams
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.readback import Readback

_Value = TypeVar("_Value")
# A step enters it where there are no other ranks.
_ALONE = nullcontext()
_NOT_FINITE = "the model computed numbers that are not finite for this request"


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    """A step that is queued on the device.

    Attributes:
        inputs: the step's rows.
        sums: [num_tokens] float32, the sum of each token's hidden state, which is not finite if the
            hidden state is not; None: every token has a view, whose logits then are no numbers.
        prompts: what was requested of prompts, also for rows that have failed.
        views: the views of each row that samples; see `sampled_views`.
        sample: the queued sampling of the views; None if there are none.
    """

    inputs: StepRows
    sums: Readback | None
    prompts: PromptDetails
    views: list[list[RowState]]
    sample: QueuedSample | None

    def are_finite(self) -> list[bool]:
        """Wait for the step; for each of its tokens, whether its hidden state is finite."""
        if self.sums is not None:
            return [math.isfinite(each) for each in self.sums.wait()[0].tolist()]
        assert self.sample is not None
        # A NaN is not less than anything; a row for which no token is possible has -inf.
        return [each < math.inf for each in self.sample.greatest_logits()]


class PagedModel:
    """Computes steps of one model.

    Attributes:
        model_config: the checkpoint's configuration.
        max_model_len: maximum tokens of prompt and output together.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        layout: CacheLayout,
        max_model_len: int,
        kv_groups: Sequence[int] = (),
        measurements: KeptMeasurements | None = None,
        grammars: Grammars | None = None,
        followers: Followers | None = None,
    ) -> None:
        """Use a model with a KV pool.

        Args:
            model: the model, on the layout's device and in its dtype.
            pool: has a cache for each of the model's layers.
            layout: the pool's layout.
            max_model_len: maximum length of a sequence.
            kv_groups: for each of the model's groups of layers, the KV group whose blocks it uses;
                empty: each has its own.
            measurements: keeps what is measured with the model; None: nothing is kept.
            grammars: compiles the grammars of rows; None: rows with grammars fail.
            followers: the other ranks of a split model; None: the model is whole.
        """
        self._kv_groups = kv_groups or range(len(model.config.layer_groups))
        self.model_config: ModelConfig = model.config
        self.max_model_len = max_model_len
        self._model = model
        self._native_model = model if isinstance(model, NativeModel) else None
        self._pool = pool
        self._layout = layout
        # One for each group of layers.
        self._layouts = [replace(layout, window=group.window) for group in model.config.layer_groups]
        pick = None if self._native_model is None else self._native_model.pick
        self._sampler = Sampler(model.config.vocab_size, pick=pick, grammars=grammars)
        self._followers = followers
        self._states = SequenceStates(self._sampler, self._kv_groups)
        self._graphs: GraphedModel | None = None
        self._sampled: SampledIds | None = None
        self._measurements = measurements or KeptMeasurements(None, {})

    @in_inference_mode
    def capture_graphs(self, buckets: Buckets, capture: Capture) -> None:
        """Capture graphs, at all ranks; steps that fit a bucket are replayed from now on."""
        self._tell(CaptureGraphs(buckets))
        self._graphs = GraphedModel(self._model, self._pool.layers, self._layouts, buckets, capture)

    def needs_ids(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can be launched only once all its ids are on the host."""
        asks = params.num_log_probs >= 0 or params.describes_prompt or params.returns_generation_logits
        return asks or params.num_candidates > 0 or self._sampler.reads_tokens(params)

    def run(self, step: StepBatch) -> ModelOutput:
        """Compute one step; see `launch`."""
        return self.launch(step)() if step.rows else ModelOutput({})

    @in_inference_mode
    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Queue one step.

        Args:
            step: has at least one row. The id of a row's last token may be unknown if the step launched
                before samples it and `needs_ids` is false for the row.

        Returns:
            A function that waits for the result, to be called once. The result has one or more tokens
            for every row that samples, or an error for a row whose numbers are not finite or for which
            no token is possible; other rows are not affected, and drafts never make a row fail. It also
            has the log-probabilities and logits that sequences ask for.
        """
        with self._among_ranks():
            self._tell(ComputeStep(step, self._graphs is not None))
            if step.block_copies:
                self._pool.copy(step.block_copies)
            return self._launch_rows(self._states.take(step))

    def _among_ranks(self) -> AbstractContextManager[None]:
        return _ALONE if self._followers is None else self._followers.computing()

    def _tell(self, message: RankMessage) -> None:
        """Let the other ranks of a split model do the same."""
        if self._followers is not None:
            self._followers.tell(message)

    def _launch_rows(self, rows: list[StateRow]) -> Callable[[], ModelOutput]:
        native = self._native_model
        if native is not None and self._samples_after_each(rows):
            queued = self._queue_at_once(native, rows)
        else:
            queued = self._queue_in_parts(rows)
        return lambda: self._finish(queued)

    def _samples_after_each(self, rows: list[StateRow]) -> bool:
        """Whether one call can sample after every token of the rows, and nothing else is wanted of them."""
        is_one = all(row.samples and len(row.token_ids) == 1 for row, _ in rows)
        states = [state.sampling for _, state in rows]
        asks = any(state.params.describes_prompt for state in states)
        return is_one and not asks and self._sampler.takes_best(states)

    def _queue_in_parts(self, rows: list[StateRow]) -> _QueuedStep:
        """Compute the layers, then what is wanted of the prompts, then the tokens."""
        inputs, hidden = self._with_memory(lambda: self._forward(rows))
        sums = Readback([hidden.sum(dim=1, dtype=torch.float32)])
        prompts = prompt_details(inputs, hidden, self._model.logits)
        views = sampled_views((row, state.sampling) for row, state in inputs.rows if row.samples)
        sample = self._start_sampling(hidden, inputs, [view for row_views in views for view in row_views])
        return _QueuedStep(inputs, sums, prompts, views, sample)

    def _queue_at_once(self, native: NativeModel, rows: list[StateRow]) -> _QueuedStep:
        """Compute layers and tokens in one native call: one is sampled after each of the rows' tokens."""
        batch, inputs = build_step_inputs(rows, self._layouts, self._sampled)
        views = sampled_views((row, state.sampling) for row, state in inputs.rows)
        flat = [view for row_views in views for view in row_views]
        sample = self._sampler.pick(flat, partial(native.whole_step, batch, self._pool.layers))
        self._keep_sampled(flat, sample)
        return _QueuedStep(inputs, None, PromptDetails(), views, sample)

    def _start_sampling(
        self, hidden: torch.Tensor, inputs: StepRows, views: list[RowState]
    ) -> QueuedSample | None:
        if not views:
            return None
        if inputs.sampled_places is not None:
            hidden = hidden.index_select(0, inputs.sampled_places)
        if self._native_model is not None and self._sampler.takes_best(views):
            sample = self._sampler.pick(views, partial(self._native_model.logits_and_best, hidden))
        else:
            logits = self._with_memory(lambda: self._model.logits(hidden))
            sample = self._sampler.start(logits, views)
        self._keep_sampled(views, sample)
        return sample

    def _keep_sampled(self, views: list[RowState], sample: QueuedSample) -> None:
        sequence_ids = [view.sequence_id for view in views]
        self._sampled = SampledIds(sequence_ids, sample.token_ids, self.model_config.vocab_size)

    @in_inference_mode
    def _finish(self, queued: _QueuedStep) -> ModelOutput:
        inputs = queued.inputs
        prompts = queued.prompts
        errors = {**prompts.errors, **_rows_not_finite(queued.are_finite(), inputs)}
        sampled = SamplerOutput() if queued.sample is None else self._sampler.finish(queued.sample)
        rows = [row for row, _ in inputs.rows if row.samples]
        result = verify(rows, queued.views, sampled, errors)
        result.errors = {**errors, **result.errors}
        result.context_logits = _without(prompts.context_logits, errors)
        result.prompt_log_probs = _without(prompts.log_probs, errors)
        failed = [each for each in inputs.rows if each.row.draft_token_ids and each.row.sequence_id in errors]
        if failed:
            with self._among_ranks():
                self._run_without_drafts(failed, result)
        return result

    def _forward(self, rows: list[StateRow]) -> tuple[StepRows, torch.Tensor]:
        replayed = self._graphs.forward(rows, self._sampled) if self._graphs is not None else None
        if replayed is not None:
            return replayed
        staged = self._followers.staged if self._followers is not None else None
        if staged is not None:
            return forward_batches(staged, rows, self._layouts, self._pool.layers)
        batch, inputs = build_step_inputs(rows, self._layouts, self._sampled)
        return inputs, self._model.forward(batch, self._pool.layers)

    def _with_memory(self, compute: Callable[[], _Value]) -> _Value:
        """Compute; if the GPU's memory is full, give back what torch keeps of it unused, and try once more.

        The largest steps have been computed at the start, so what is missing is in pieces, or another
        program has taken it. The ranks of a split model compute in step, so none of them repeats anything.

        Raises:
            torch.OutOfMemoryError: the memory is still full.
        """
        try:
            return compute()
        except torch.OutOfMemoryError:
            if self._followers is not None:
                raise
        # The error has kept the tensors of the failed attempt until here.
        torch.cuda.empty_cache()
        return compute()

    def _run_without_drafts(self, rows: list[StateRow], result: ModelOutput) -> None:
        """Compute failed rows again without drafts, which may have caused the numbers that are not finite.

        Attention multiplies masked values by 0, so they can affect known tokens before a draft too.
        """
        size = self._layout.block_size
        known_rows = []
        for row, state in rows:
            tables = state.block_tables
            self._zero_slots([slots_of(table, row.known_end, row.end, size) for table in tables])
            known_rows.append(StateRow(msgspec.structs.replace(row, draft_token_ids=()), state))
            del result.errors[row.sequence_id]
        sequence_ids = [row.sequence_id for row, _ in known_rows]
        self._tell(ComputeWithoutDrafts(sequence_ids, self._graphs is not None))
        again = self._launch_rows(known_rows)()
        for field in msgspec.structs.fields(ModelOutput):
            getattr(result, field.name).update(getattr(again, field.name))

    @in_inference_mode
    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Set blocks of each KV group to 0: their values may not be finite, and they will be reused."""
        own = [list(block_ids[group]) for group in self._kv_groups]
        self._tell(ZeroBlocks(own))
        self._pool.zero(own)

    @in_inference_mode
    def clear_slots(self, slots: Sequence[Sequence[int]]) -> None:
        """Set single slots of each KV group to 0."""
        self._zero_slots([list(slots[group]) for group in self._kv_groups])

    def _zero_slots(self, slots: list[list[int]]) -> None:
        self._tell(ZeroSlots(slots))
        self._pool.zero_slots(slots)

    def measure_step_costs(self) -> MeasuredCosts:
        """Measure the cost of steps, which takes some seconds on a CPU unless it was measured earlier."""
        return self._measured("step_costs", MeasuredCosts, self._measure_step_costs)

    def _measure_step_costs(self) -> MeasuredCosts:
        is_cuda = self._layout.device.type == "cuda"
        costs = measure_step_costs(self.run, self._longest_probe, self._layout.block_size, is_cuda=is_cuda)
        self._end_probes()
        return costs

    def _measured(self, name: str, kind: type[_Value], measure: Callable[[], _Value]) -> _Value:
        """Return what an earlier start has measured with this model and these probes, or measure."""
        facts: dict[str, int | str] = {
            "longest_probe": self._longest_probe,
            "block_size": self._layout.block_size,
            "num_layers": self.model_config.num_layers,
        }
        return self._measurements.get(name, kind, measure, facts)

    @property
    def _longest_probe(self) -> int:
        """Number of tokens whose blocks exist in all groups."""
        return min(self.max_model_len, self._pool.num_blocks * self._layout.block_size)

    def _end_probes(self) -> None:
        """Clear the blocks that probes have written, and drop the probes' sequences."""
        blocks = probed_blocks(self._longest_probe, self._layout.block_size)
        self.clear_blocks([blocks] * (1 + max(self._kv_groups)))
        self._tell(ForgetSequences())
        self._states.clear()


def _without(details: dict[int, _Value], failed: dict[int, NaiadError]) -> dict[int, _Value]:
    return {each: value for each, value in details.items() if each not in failed}


def _rows_not_finite(finite: list[bool], inputs: StepRows) -> dict[int, NaiadError]:
    """Errors for the sequences with a token, sampled from or not, whose hidden state is not finite."""
    if all(finite):
        return {}
    errors: dict[int, NaiadError] = {}
    start = 0
    for end, (row, _) in zip(inputs.ends, inputs.rows, strict=True):
        if not all(finite[start:end]):
            errors[row.sequence_id] = InternalError(_NOT_FINITE)
        start = end
    return errors
