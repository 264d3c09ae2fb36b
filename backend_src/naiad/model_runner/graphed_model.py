"""`GraphedModel`: steps of few tokens, captured once for each size and replayed.

Replaying a step costs the host one call. Launching its kernels one by one would take longer than a GPU
needs to compute a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from naiad.model_runner.graph_buckets import Bucket, Buckets
from naiad.model_runner.sequence_states import StateRow
from naiad.model_runner.step_inputs import SampledIds, StepRows, StepTokens, sampled_places
from naiad.models import DecoderModel, ForwardBatch, GroupInputs
from naiad_kernels.paged_attention import AttentionPlan
from naiad_kernels.paged_attention.device_step import padded_run, plan_padded_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.staging import Staging
from naiad_kernels.store_kv import LayerCache, Slots

# Takes a computation and returns a function that repeats it over the same memory.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
_PADDING_SLOT = -1


def cuda_capture(has_ranks: bool = False) -> Capture:
    """Return a function that captures CUDA graphs; the graphs share the memory of intermediate results.

    Args:
        has_ranks: the computation exchanges tensors with other ranks. NCCL's own thread asks for its events
            meanwhile, which is no fault of the computation.
    """
    error_mode = "thread_local" if has_ranks else "global"
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
            compute()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


class GraphedModel:
    """Graphs of a model's forward pass over one KV pool.

    A step is padded to the next captured size with empty sequences and with tokens that are never
    cached. Lengths and block tables are read from memory in each replay, so they may change.
    """

    def __init__(
        self,
        model: DecoderModel,
        caches: Sequence[LayerCache],
        layouts: Sequence[CacheLayout],
        buckets: Buckets,
        capture: Capture,
    ) -> None:
        """Compute and capture a step of every bucket.

        Args:
            model: the model.
            caches: one for each layer; the graphs read and write this memory from now on.
            layouts: the caches' layouts, one for each group of layers.
            buckets: the sizes to capture.
            capture: captures a graph.
        """
        self._model = model
        self._caches = caches
        self._layouts = layouts
        self._layout = layout = layouts[0]
        self._buckets = buckets
        every = buckets.all()
        num_tokens = max(bucket.num_tokens for bucket in every)
        device = layout.device
        num_bytes = max(self._num_bytes(bucket) for bucket in every)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hidden = torch.zeros(num_tokens, model.config.hidden_size, dtype=layout.dtype, device=device)
        self._replays = {bucket: self._captured(bucket, capture) for bucket in every}

    def forward(
        self, rows: list[StateRow], sampled: SampledIds | None = None
    ) -> tuple[StepRows, torch.Tensor] | None:
        """Compute a step, if it fits a bucket.

        Args:
            rows: the step's rows.
            sampled: the ids that the last step sampled, if some ids of this one may be unknown.

        Returns:
            The step's rows and hidden states, `[num_tokens, hidden_size]`, valid until the next call;
            None: the step is too large.
        """
        query_len = max(row.num_scheduled_tokens for row, _ in rows)
        seq_len = max(row.end for row, _ in rows)
        bucket = self._buckets.smallest(len(rows), query_len, seq_len)
        if bucket is None:
            return None
        tokens = StepTokens.of(rows, self._layouts, sampled)
        places = sampled_places(rows, tokens.ends)
        staging = self._staging(bucket)
        token_ids, _ = self._put(staging, bucket, tokens, rows)
        place_tensor = staging.put(places, torch.int64)
        staging.send()
        if sampled is not None and tokens.has_unknown:
            sampled.fill(token_ids)
        self._replays[bucket]()
        return StepRows(rows, tokens.ends, place_tensor), self._hidden[: len(tokens.token_ids)]

    def _captured(self, bucket: Bucket, capture: Capture) -> Callable[[], None]:
        staging = self._staging(bucket)
        _, batch_of = self._put(staging, bucket, StepTokens.of([], self._layouts), [])
        staging.send()

        def compute() -> None:
            hidden = self._model.forward(batch_of(), self._caches)
            self._hidden[: bucket.num_tokens].copy_(hidden)

        # Anything initialised by the first call, such as kernels, can not be initialised during a capture.
        compute()
        return capture(compute)

    def _put(
        self, staging: Staging, bucket: Bucket, tokens: StepTokens, rows: Sequence[StateRow]
    ) -> tuple[torch.Tensor, Callable[[], ForwardBatch]]:
        """Write a step to `staging`; return its ids and a function that makes the batch once it is sent."""
        num_padded = bucket.num_tokens - len(tokens.token_ids)
        token_ids = staging.put(tokens.token_ids + [0] * num_padded, torch.int64)
        positions = staging.put(tokens.positions + [0] * num_padded, torch.int64)
        padding = [_PADDING_SLOT] * num_padded
        slot_mappings = [staging.put(slots + padding, torch.int64) for slots in tokens.slots]
        layout = self._layout
        run = padded_run(layout, bucket.num_seqs, bucket.query_len, bucket.max_seq_len)
        plans = []
        for group, each in enumerate(self._layouts):
            tables = [state.block_tables[group] for _, state in rows]
            step = plan_padded_step(tokens.query_lens, tokens.seq_lens, tables, each, run, staging)
            plans.append(AttentionPlan(num_tokens=bucket.num_tokens, singles=[], chunks=[], device_step=step))

        def batch() -> ForwardBatch:
            groups = [
                GroupInputs(Slots.from_slot_mapping(slots, layout.block_size), plan)
                for slots, plan in zip(slot_mappings, plans, strict=True)
            ]
            return ForwardBatch(token_ids, positions, groups)

        return token_ids, batch

    def _staging(self, bucket: Bucket) -> Staging:
        return Staging(self._num_bytes(bucket), self._layout.device, self._inputs)

    def _num_bytes(self, bucket: Bucket) -> int:
        # The tokens' ids, positions and slots in each group, and the sampled places.
        wide = [bucket.num_tokens] * (3 + len(self._layouts))
        num_table = bucket.num_seqs * self._layout.blocks_for(bucket.max_seq_len)
        narrow = [num_table, bucket.num_seqs, bucket.num_seqs + 1] * len(self._layouts)
        return Staging.bytes_for(wide, narrow)
