"""One token for each row of logits, each row by its own parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from naiad.outputs import ModelOutput
from naiad.sampling.filters import kept_threshold
from naiad.sampling.noise import gumbel_noise, noise_key
from naiad.sampling.penalties import apply_penalties, mask_stop_tokens
from naiad.sequence import SamplingParams, Sequence

# Best tokens looked at before a whole row is sorted; seldom do top-k and top-p keep more.
_MIN_CANDIDATES = 256
# Logits whose noise is made at once: bounds the memory, and stays in the cache on a CPU.
_MAX_NOISE = 1 << 18
# Dividing by less would overflow; a token that is worse at all has no chance long before.
_MIN_TEMPERATURE = 1e-30


class Sampler:
    """Draws by the Gumbel-max trick: the best of logit / temperature + noise.

    Order of a row's pipeline: repetition penalty, frequency and presence penalties, min_tokens,
    temperature, top-k, top-p, draw. Its result depends on the row alone: not on its batch
    mates, not on its place among them.
    """

    def __init__(self, vocab_size: int) -> None:
        """Sample ids in [0, vocab_size)."""
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: list[Sequence]) -> ModelOutput:
        """Sample the token that follows each sequence's known tokens.

        Args:
            logits: [num_rows, vocab_size] float32; overwritten.
            rows: the sequence of each row.

        Returns:
            An id for each row, or an error for rows with NaN or +inf in their logits, or with
            no possible token at all.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        assert logits.dtype == torch.float32
        if not rows:
            return ModelOutput({})
        apply_penalties(logits, rows)
        mask_stop_tokens(logits, rows)
        # The maximum is NaN, +inf or -inf exactly if the row can not be used.
        best, token_ids = logits.max(dim=1)
        usable = best.isfinite().tolist()
        drawn = [index for index, row in enumerate(rows) if usable[index] and not _is_greedy(row.params)]
        if drawn:
            self._draw(logits, best, rows, drawn, token_ids)
        return self._output(rows, usable, token_ids.tolist())

    def _output(self, rows: list[Sequence], usable: list[bool], token_ids: list[int]) -> ModelOutput:
        output = ModelOutput({})
        for row, is_usable, token_id in zip(rows, usable, token_ids, strict=True):
            if not is_usable:
                output.errors[row.sequence_id] = "the model's output for this request is not finite"
            elif not 0 <= token_id < self._vocab_size:
                output.errors[row.sequence_id] = "the token drawn for this request is out of range"
            else:
                output.sampled_token_ids[row.sequence_id] = token_id
        return output

    def _draw(
        self, logits: Tensor, best: Tensor, rows: list[Sequence], drawn: list[int], token_ids: Tensor
    ) -> None:
        """Overwrite `token_ids` for the rows in `drawn`."""
        filtered = [index for index in drawn if _is_filtered(rows[index].params)]
        width = min(self._vocab_size, max([_MIN_CANDIDATES, *(2 * rows[i].params.top_k for i in filtered)]))
        # Rows that may keep more than the candidates show are done again with all tokens.
        for width_now in (width, self._vocab_size):
            undecided: list[int] = []
            for part in self._parts(filtered, width_now):
                row = _Rows.of(rows, part, logits, best, self._vocab_size)
                chosen, is_decided = _draw_filtered(row, width_now)
                token_ids[row.indices] = chosen
                undecided += [index for index, ok in zip(part, is_decided, strict=True) if not ok]
            filtered = undecided
        free = [index for index in drawn if not _is_filtered(rows[index].params)]
        for part in self._parts(free, self._vocab_size):
            row = _Rows.of(rows, part, logits, best, self._vocab_size)
            token_ids[row.indices] = _draw_free(row)

    def _parts(self, indices: list[int], width: int) -> list[list[int]]:
        size = max(1, _MAX_NOISE // width)
        return [indices[start : start + size] for start in range(0, len(indices), size)]


@dataclass(slots=True, frozen=True)
class _Rows:
    """Some rows of the batch. The last four are [n, 1] or [n]; `logits` is [n, vocab_size]."""

    indices: Tensor
    logits: Tensor
    best: Tensor
    temperature: Tensor
    keys: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(
        cls, rows: list[Sequence], indices: list[int], logits: Tensor, best: Tensor, vocab_size: int
    ) -> _Rows:
        """Gather the rows `indices` and their parameters."""
        device = logits.device
        params = [rows[index].params for index in indices]
        keys = [noise_key(rows[index].params.seed, rows[index].num_tokens) for index in indices]
        index = torch.tensor(indices, device=device)
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
        return cls(
            indices=index,
            logits=logits[index],
            best=best[index].unsqueeze(1),
            temperature=temperature.clamp_(min=_MIN_TEMPERATURE).unsqueeze(1),
            keys=torch.tensor(keys, device=device).unsqueeze(1),
            top_k=torch.tensor([min(p.top_k, vocab_size) for p in params], device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        )

    def scaled(self, logits: Tensor) -> Tensor:
        """These rows' logits less the best one, over temperature: float64, ≤ 0."""
        return (logits.to(torch.float64) - self.best).div_(self.temperature)

    def total_mass(self) -> Tensor:
        """The sum of exp(scaled logit) over the vocabulary, [n] float64.

        The summands are float32 for speed; their sum is float64, so that the order in which a
        batch of another size is summed does not show.
        """
        scaled = (self.logits - self.best).div_(self.temperature.to(torch.float32))
        return scaled.exp_().sum(1, dtype=torch.float64)


def _draw_filtered(rows: _Rows, width: int) -> tuple[Tensor, list[bool]]:
    """Draw among the best `width` tokens; says of which rows that was all that can be kept."""
    vocab_size = rows.logits.shape[1]
    if width < vocab_size:
        best_logits, token_ids = rows.logits.topk(width, dim=1)
    else:
        best_logits, token_ids = rows.logits.sort(dim=1, descending=True)
    values = rows.scaled(best_logits)
    needs_mass = bool(((rows.top_k == 0) & (rows.top_p < 1)).any())
    total_mass = rows.total_mass() if needs_mass else torch.zeros_like(rows.top_p)
    threshold, is_final = kept_threshold(values, rows.top_k, rows.top_p, total_mass)
    scores = values + gumbel_noise(rows.keys, token_ids)
    scores.masked_fill_(values < threshold, float("-inf"))
    chosen = token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    return chosen, (is_final | (width == vocab_size)).tolist()


def _draw_free(rows: _Rows) -> Tensor:
    """Draw among all tokens."""
    token_ids = torch.arange(rows.logits.shape[1], device=rows.logits.device)
    return gumbel_noise(rows.keys, token_ids).add_(rows.scaled(rows.logits)).argmax(dim=1)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1
