"""Drawing on a GPU: what `draw` does, by kernels that read nothing back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from naiad.sampling.draw import MAX_TEMPERATURE, MIN_TEMPERATURE, is_filtered
from naiad.sampling.filters import top_p_now
from naiad.sampling.noise import noise_key
from naiad.sampling.sampled_row import SampledRow
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.staging import Staging

# Lists of eight bytes a number that a draw needs of its rows.
_NUM_LISTS = 6


def draw_on_device(
    logits: Tensor, best: Tensor, rows: Sequence[SampledRow], drawn: list[int], token_ids: Tensor
) -> None:
    """Draw for some rows the best of logit / temperature + noise.

    Args:
        logits: [num_rows, vocab_size] float32.
        best: [num_rows] float32, each row's greatest logit; where it is not finite, any id is drawn.
        rows: the sequence of each row.
        drawn: indices of the rows to draw for.
        token_ids: [num_rows] int64; those of `drawn` are overwritten.
    """
    chosen = [rows[index] for index in drawn]
    params = [row.params for row in chosen]
    staging = Staging(Staging.bytes_for([len(drawn)] * _NUM_LISTS, []), logits.device)
    index = staging.put(drawn, torch.int64)
    keys = [noise_key(row.params.seed, row.num_tokens) for row in chosen]
    key_tensor = staging.put(keys, torch.int64)
    scales = [min(max(each.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for each in params]
    temperature = staging.put(scales, torch.float64)
    top_k = staging.put([min(each.top_k, logits.shape[1]) for each in params], torch.int64)
    top_p = staging.put([top_p_now(row) for row in chosen], torch.float64)
    min_p = staging.put([each.min_p for each in params], torch.float64)
    staging.send()
    if len(drawn) < len(rows):
        logits, best = logits.index_select(0, index), best.index_select(0, index)
    if any(is_filtered(each) for each in params):
        threshold = kept_threshold(logits, best, RowFilters(temperature, top_k, top_p, min_p.log()))
    else:
        threshold = torch.full_like(temperature, float("-inf"))
    token_ids.index_copy_(0, index, gumbel_argmax(logits, best, temperature, threshold, key_tensor))
