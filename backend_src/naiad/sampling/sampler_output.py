"""The sampler's output: tokens, beam candidates, and the logits and log-probabilities for clients.

Clients get the model's own logits and their log-probabilities, both before any processor; of beams they
get the candidates' log-probabilities instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from naiad.errors import InternalError, NaiadError
from naiad.outputs import TokenLogProbs
from naiad.sampling.row_state import RowState

NOT_FINITE = "the model's output for this request is not finite"
# Maximum number of logits in one log-softmax: bounds the memory and fits a CPU's cache.
_MAX_LOGITS = 1 << 18


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    """One token for each row, by the rows' sequence ids; otherwise like `ModelOutput`.

    Attributes:
        sampled_token_ids: for rows that are not beams and have not failed.
        errors: for rows without a token, the reason.
        log_probs, generation_logits: for rows with a token that asked for them.
        candidates: for beams.
    """

    sampled_token_ids: dict[int, int] = field(default_factory=dict)
    errors: dict[int, NaiadError] = field(default_factory=dict)
    log_probs: dict[int, TokenLogProbs] = field(default_factory=dict)
    generation_logits: dict[int, bytes] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def float32_bytes(values: Tensor) -> bytes:
    """Convert a tensor to little-endian float32 bytes, row by row."""
    return values.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()


@dataclass(slots=True, frozen=True)
class RawLogits:
    """The unprocessed logits of the rows that asked for logits or log-probabilities.

    Attributes:
        rows: the rows that asked.
        logits: [len(rows), vocab_size] float32, a copy.
    """

    rows: Sequence[RowState]
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, rows: Sequence[RowState]) -> RawLogits | None:
        """Copy the logits of the rows that asked; None if there are none."""
        indices = [index for index, row in enumerate(rows) if _asks(row)]
        if not indices:
            return None
        return cls([rows[index] for index in indices], logits[torch.tensor(indices, device=logits.device)])

    def add_to(self, output: SamplerOutput) -> None:
        """Add what rows with a token asked for to the output.

        A row whose log-probability is not finite fails instead.
        """
        sampled = output.sampled_token_ids
        kept = [index for index, row in enumerate(self.rows) if row.sequence_id in sampled]
        for index in kept:
            row = self.rows[index]
            if row.params.returns_generation_logits:
                output.generation_logits[row.sequence_id] = float32_bytes(self.logits[index])
        asking = [index for index in kept if self.rows[index].params.num_log_probs >= 0]
        size = max_log_prob_rows(self.logits)
        for start in range(0, len(asking), size):
            self._add_log_probs(asking[start : start + size], output)

    def _add_log_probs(self, asking: list[int], output: SamplerOutput) -> None:
        rows = [self.rows[index] for index in asking]
        raw = self.logits[torch.tensor(asking, device=self.logits.device)]
        token_ids = [output.sampled_token_ids[row.sequence_id] for row in rows]
        num_top = max(row.params.num_log_probs for row in rows)
        for row, found in zip(rows, token_log_probs(raw, token_ids, num_top), strict=True):
            if math.isfinite(found.log_prob):
                num = row.params.num_log_probs
                output.log_probs[row.sequence_id] = TokenLogProbs(
                    found.log_prob, found.top_token_ids[:num], found.top_log_probs[:num], found.rank
                )
            else:
                del output.sampled_token_ids[row.sequence_id]
                output.generation_logits.pop(row.sequence_id, None)
                output.errors[row.sequence_id] = InternalError(NOT_FINITE)


def max_log_prob_rows(logits: Tensor) -> int:
    """Maximum number of rows of these logits in one `token_log_probs`; at least one."""
    return max(1, _MAX_LOGITS // logits.shape[1])


def token_log_probs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogProbs]:
    """Return the log-probabilities of a token of each row and of the row's best tokens.

    Args:
        logits: [num_rows, vocab_size] float32.
        token_ids: the token of each row.
        num_top: number of best tokens; not more than there are in the vocabulary.
    """
    table = logits.log_softmax(dim=1)
    places = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = table.gather(1, places).squeeze(1)
    ranks = (logits > logits.gather(1, places)).sum(dim=1) + 1
    top_ids = best_token_ids(logits, min(num_top, logits.shape[1]))
    top_log_probs = table.gather(1, top_ids)
    columns = (each.tolist() for each in (chosen, top_ids, top_log_probs, ranks))
    return [TokenLogProbs(*row) for row in zip(*columns, strict=True)]


def best_token_ids(logits: Tensor, num: int) -> Tensor:
    """Return the best tokens of each row, best first; among ties the lower id comes first.

    Args:
        logits: [num_rows, vocab_size] float32.
        num: number of tokens, in [0, vocab_size].

    Returns:
        [num_rows, num] int64.
    """
    vocab_size = logits.shape[1]
    if num == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    values, token_ids = logits.topk(min(num + 1, vocab_size), dim=1)
    best = _in_order(values, token_ids, num)
    # Among tokens that tie with the last one, topk may return any.
    tied = (values[:, num:] == values[:, num - 1 : num]).any(dim=1)
    if bool(tied.any()):
        everything = torch.arange(vocab_size, device=logits.device).expand(int(tied.sum()), -1)
        best[tied] = _in_order(logits[tied], everything, num)
    return best


def _in_order(values: Tensor, token_ids: Tensor, num: int) -> Tensor:
    """Return the ids of the `num` greatest values, the lower id first where values are equal.

    The sort keys are int64: the value's bits, mapped so that they compare as the value does, above the
    id.
    """
    # Adding zero makes zeros of both signs equal.
    bits = (values + 0.0).view(torch.int32)
    comparable = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (comparable.to(torch.int64) << 32) | (0x7FFFFFFF - token_ids)
    best = keys.topk(num, dim=1).values
    return 0x7FFFFFFF - (best & 0xFFFFFFFF)


def _asks(row: RowState) -> bool:
    return row.params.num_log_probs >= 0 or row.params.returns_generation_logits


def normalize(logits: Tensor, indices: list[int]) -> None:
    """Turn the beams' logits into log-probabilities, in place, before processors, as in transformers.

    Args:
        logits: [num_rows, vocab_size] float32.
        indices: the rows that are beams.
    """
    if indices:
        index = torch.tensor(indices, device=logits.device)
        logits[index] = logits[index].log_softmax(dim=1)


def add_candidates(
    logits: Tensor, rows: Sequence[RowState], indices: list[int], output: SamplerOutput
) -> None:
    """Replace the beams' sampled ids by their candidates, the best possible tokens.

    Args:
        logits: [num_rows, vocab_size] float32, processed.
        rows: the state of each row.
        indices: the rows that are beams.
        output: contains no id for beams that failed or have no possible token.
    """
    kept = [index for index in indices if rows[index].sequence_id in output.sampled_token_ids]
    if not kept:
        return
    chosen = logits[torch.tensor(kept, device=logits.device)]
    num = min(max(rows[index].params.num_candidates for index in kept), chosen.shape[1])
    token_ids = best_token_ids(chosen, num)
    log_probs = chosen.gather(1, token_ids)
    for index, ids, their_log_probs in zip(kept, token_ids.tolist(), log_probs.tolist(), strict=True):
        sequence_id = rows[index].sequence_id
        wanted = rows[index].params.num_candidates
        del output.sampled_token_ids[sequence_id]
        candidates = list(zip(ids, their_log_probs, strict=True))[:wanted]
        output.candidates[sequence_id] = [each for each in candidates if each[1] > -math.inf]
