"""What `rejection_sampling` computes, in plain torch."""

from __future__ import annotations

import torch

from naiad_kernels.gumbel_argmax.reference import gumbel_noise, uniform_noise
from naiad_kernels.rejection_sampling.rows import ACCEPT_NOISE_ID, RESIDUAL_FLOOR, Drafts, TargetRows


def rejection_sampling(
    target: TargetRows, drafts: Drafts, row_start_loc: torch.Tensor, max_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public op; float64 arithmetic."""
    starts, ends = row_start_loc[:-1, None].long(), row_start_loc[1:, None].long()
    slots = torch.arange(max_drafts + 1, device=starts.device)
    rows = starts + slots
    is_row = rows < ends
    if len(target.logits) == 0:
        return starts.new_zeros(len(starts)), torch.full_like(rows, -1)
    token_ids, is_accepted = _decide(target, drafts)
    rows = rows.clamp(max=len(token_ids) - 1)
    is_run = (is_accepted[rows] & is_row).long().cumprod(1).bool()
    num_accepted = is_run.sum(1)
    emitted = torch.where(is_run, drafts.token_ids[rows], token_ids[rows])
    return num_accepted, emitted.masked_fill(~is_row | (slots > num_accepted[:, None]), -1)


def _decide(target: TargetRows, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row if its draft is rejected, and whether it is accepted, `[num_rows]`."""
    is_greedy = target.temperature == 0
    temperature = target.temperature.masked_fill(is_greedy, 1)
    scaled = (target.logits.double() - target.best[:, None]) / temperature[:, None]
    scores = scaled.masked_fill(scaled < target.threshold[:, None], -torch.inf)
    uses_law = torch.zeros_like(is_greedy)
    is_within = torch.zeros_like(is_greedy)
    if drafts.probs is not None:
        uses_law = (drafts.token_ids >= 0) & ~is_greedy
        draft_probs = drafts.probs.double().masked_fill(~uses_law[:, None], 0)
        target_probs = scores.softmax(1)
        chosen = drafts.token_ids.clamp(min=0)[:, None]
        uniform = uniform_noise(target.keys, torch.tensor([ACCEPT_NOISE_ID], device=chosen.device))
        is_within = _is_accepted(uniform, target_probs.gather(1, chosen), draft_probs.gather(1, chosen))[:, 0]
        residual = _residual(target_probs, draft_probs).log()
        scores = torch.where(uses_law[:, None], residual, scores)
    scores = scores + gumbel_noise(target.keys, scores.shape[1])
    token_ids = torch.where(is_greedy[:, None], target.logits.double(), scores).argmax(1)
    return token_ids, torch.where(uses_law, is_within, drafts.token_ids == token_ids)


def _is_accepted(uniform: torch.Tensor, target_prob: torch.Tensor, draft_prob: torch.Tensor) -> torch.Tensor:
    """True with probability min(1, target / draft); never for what the target can not emit."""
    return uniform * draft_prob < target_prob


def _residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """What the target has more than the draft, not normalised; see RESIDUAL_FLOOR."""
    return torch.maximum(target_probs - draft_probs, target_probs * RESIDUAL_FLOOR)
