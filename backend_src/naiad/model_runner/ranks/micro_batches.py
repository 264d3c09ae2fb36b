"""Micro-batches: what the stages of a model compute at the same time, each stage another one.

All ranks cut a step in the same way, by the step and the configuration alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from naiad.model_runner.sequence_states import StateRow
from naiad.model_runner.step_inputs import StepRows, build_step_inputs, sampled_places
from naiad.models.split.staged_model import StagedModel
from naiad.outputs import StepRow
from naiad.sequence import UNKNOWN_TOKEN
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import LayerCache

# A stage takes as long for fewer tokens as for these, because it reads all its weights in any case.
_MIN_TOKENS = {"cpu": 16, "cuda": 256}


def micro_batches(rows: Sequence[StateRow], max_batches: int, min_tokens: int) -> list[list[StateRow]]:
    """Cut a step into batches of about the same number of tokens.

    Batches are computed in order, and rows keep theirs: a row may read keys and values that one before it
    writes in the same step. The rest of a row that is cut reads those of the row's beginning in the same way.

    Args:
        rows: the step's rows.
        max_batches: maximum number of batches.
        min_tokens: mean number of tokens of a batch, at least, if there are several. A row is not cut among
            its drafts.
    """
    num_tokens = sum(row.num_scheduled_tokens for row, _ in rows)
    num_batches = max(1, min(max_batches, num_tokens // min_tokens))
    bounds = [num_tokens * index // num_batches for index in range(1, num_batches)]
    batches: list[list[StateRow]] = [[] for _ in range(num_batches)]
    end = 0
    for whole, state in rows:
        row, start, end = whole, end, end + whole.num_scheduled_tokens
        for bound in bounds:
            if start < bound < start + len(row.token_ids):
                begun, row = _cut(row, bound - start)
                batches[bisect_right(bounds, start)].append(StateRow(begun, state))
                start = bound
        batches[bisect_right(bounds, start)].append(StateRow(row, state))
    return [batch for batch in batches if batch]


def start_batches(
    model: StagedModel,
    rows: Sequence[StateRow],
    layouts: Sequence[CacheLayout],
    caches: Sequence[LayerCache],
) -> list[StepRows]:
    """Compute this rank's share of a step in micro-batches; `StagedModel.finish` waits for the others.

    Args:
        model: the rank's.
        rows: the step's rows; every token's id is known.
        layouts: the cache's layouts, one for each group of layers.
        caches: one for each of the rank's layers.

    Returns:
        The rows of each batch.
    """
    started = []
    for batch_rows in micro_batches(rows, model.num_stages, _MIN_TOKENS[layouts[0].device.type]):
        batch, inputs = build_step_inputs(batch_rows, layouts)
        model.start(batch, caches)
        started.append(inputs)
    return started


def forward_batches(
    model: StagedModel,
    rows: Sequence[StateRow],
    layouts: Sequence[CacheLayout],
    caches: Sequence[LayerCache],
) -> tuple[StepRows, torch.Tensor]:
    """Compute a step at the first rank; the arguments are those of `start_batches`.

    Returns:
        The step's rows, and the hidden states of their tokens after the final norm.
    """
    batches = start_batches(model, rows, layouts, caches)
    results = model.finish()
    if len(batches) == 1:
        return batches[0], results[0]
    places: dict[int, list[int]] = defaultdict(list)
    first = 0
    for batch in batches:
        start = first
        for (row, _), batch_end in zip(batch.rows, batch.ends, strict=True):
            places[row.sequence_id].extend(range(start, first + batch_end))
            start = first + batch_end
        first = start
    # In the step's order, not in that of the batches: these rows may be computed again.
    order: list[int] = []
    ends = []
    for row, _ in rows:
        order += places[row.sequence_id]
        ends.append(len(order))
    device = results[0].device
    hidden = torch.cat(results).index_select(0, torch.tensor(order, device=device))
    sampled = torch.tensor(sampled_places(rows, ends), dtype=torch.int64, device=device)
    return StepRows(list(rows), ends, sampled), hidden


def _cut(row: StepRow, num_tokens: int) -> tuple[StepRow, StepRow]:
    """Cut a row after some of its known tokens, but not after the last one."""
    replace = msgspec.structs.replace
    begun = replace(
        row,
        token_ids=row.token_ids[:num_tokens],
        samples=False,
        draft_token_ids=(),
        next_token_id=UNKNOWN_TOKEN,
    )
    return begun, replace(row, start=row.start + num_tokens, token_ids=row.token_ids[num_tokens:])
