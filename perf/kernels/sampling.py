"""Drawing tokens, verifying drafts, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from perf.kernels.cases import Case, Rival, equals, num_bytes, optional_module
from perf.kernels.sizes import Sizes

from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.gumbel_argmax import reference as gumbel_reference
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.kept_threshold import reference as threshold_reference
from naiad_kernels.rejection_sampling import Drafts, TargetRows, rejection_sampling
from naiad_kernels.rejection_sampling import reference as rejection_reference
from naiad_kernels.top_log_probs import reference as log_probs_reference
from naiad_kernels.top_log_probs import top_log_probs

_TEMPERATURE, _TOP_K, _TOP_P, _NUM_TOP, _NUM_DRAFTS = 0.8, 50, 0.95, 20, 3


def sampling_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Each op for each number of rows."""
    for num_rows in sizes.num_rows:
        logits = torch.randn(num_rows, sizes.vocab_size, device=device) * 3
        yield _draw(logits, is_filtered=False)
        yield _draw(logits, is_filtered=True)
        yield _reject(logits)
        yield _log_probs(logits)


def _draw(logits: torch.Tensor, is_filtered: bool) -> Case:
    """From the logits to the token: the best logit, what is kept, the draw."""
    num_rows, device = len(logits), logits.device
    wide = torch.full((num_rows,), _TEMPERATURE, dtype=torch.float64, device=device)
    any_token = torch.full_like(wide, -torch.inf)
    top_k = torch.full((num_rows,), _TOP_K, device=device)
    filters = RowFilters(wide, top_k, torch.full_like(wide, _TOP_P), any_token)
    keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)

    def run() -> torch.Tensor:
        best = logits.amax(1)
        threshold = kept_threshold(logits, best, filters) if is_filtered else any_token
        return gumbel_argmax(logits, best, wide, threshold, keys)

    def expected() -> torch.Tensor:
        best, threshold = logits.amax(1), any_token
        if is_filtered:
            threshold = threshold_reference.kept_threshold(
                logits, best, wide, top_k, filters.top_p, any_token
            )
        return gumbel_reference.gumbel_argmax(logits, best, wide, threshold, keys)

    op = "sample, top-k and top-p" if is_filtered else "sample, temperature"
    return Case(
        op=op,
        shape=_shape(logits),
        run=run,
        check=equals(op, expected),
        rivals=_rivals(logits, is_filtered),
        num_bytes=num_bytes(logits),
        logits_bytes=num_bytes(logits),
        target="sampler",
    )


def _rivals(logits: torch.Tensor, is_filtered: bool) -> dict[str, Rival]:
    """They draw by noise of their own, so no two tokens need be the same."""
    flashinfer = optional_module("flashinfer")

    def probs() -> torch.Tensor:
        return (logits / _TEMPERATURE).softmax(1)

    def sorted_draw() -> torch.Tensor:
        ordered, ids = probs().sort(dim=1, descending=True)
        ordered[:, _TOP_K:] = 0
        ordered[ordered.cumsum(1) - ordered > _TOP_P * ordered.sum(1, keepdim=True)] = 0
        return ids.gather(1, ordered.multinomial(1))[:, 0]

    def filtered_draw() -> torch.Tensor:
        drawn: torch.Tensor = flashinfer.sampling.top_k_top_p_sampling_from_probs(probs(), _TOP_K, _TOP_P)
        return drawn

    def draw() -> torch.Tensor:
        drawn: torch.Tensor = flashinfer.sampling.sampling_from_probs(probs())
        return drawn

    theirs = filtered_draw if is_filtered else draw
    return {
        "torch": Rival(sorted_draw if is_filtered else lambda: probs().multinomial(1)[:, 0], False),
        "FlashInfer": Rival(theirs if flashinfer else None, False),
    }


def _reject(logits: torch.Tensor) -> Case:
    num_rows, device = len(logits), logits.device
    wide = torch.full((num_rows,), _TEMPERATURE, dtype=torch.float64, device=device)
    keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
    target = TargetRows(logits, logits.amax(1), wide, torch.full_like(wide, -torch.inf), keys)
    probs = (logits + torch.randn_like(logits)).softmax(1)
    drafts = Drafts(probs.multinomial(1)[:, 0], probs)
    starts = torch.arange(0, num_rows + 1, 1 + _NUM_DRAFTS, dtype=torch.int32, device=device)
    drafts.token_ids[_NUM_DRAFTS :: 1 + _NUM_DRAFTS] = -1
    return Case(
        op="rejection_sampling",
        shape=_shape(logits),
        run=lambda: rejection_sampling(target, drafts, starts, _NUM_DRAFTS)[1],
        check=equals(
            "rejection_sampling",
            lambda: rejection_reference.rejection_sampling(target, drafts, starts, _NUM_DRAFTS)[1],
        ),
        num_bytes=2 * num_bytes(logits),
        logits_bytes=num_bytes(logits),
    )


def _log_probs(logits: torch.Tensor) -> Case:
    chosen = torch.randint(logits.shape[1], (len(logits),), device=logits.device)

    def by_torch() -> torch.Tensor:
        log_probs = logits.log_softmax(1)
        return log_probs.topk(_NUM_TOP, dim=1).values

    return Case(
        op="top_log_probs",
        shape=_shape(logits),
        run=lambda: top_log_probs(logits, chosen, _NUM_TOP)[2],
        check=equals("top_log_probs", lambda: log_probs_reference.top_log_probs(logits, chosen, _NUM_TOP)[2]),
        rivals={"torch": Rival(by_torch)},
        num_bytes=num_bytes(logits),
        logits_bytes=num_bytes(logits),
    )


def _shape(logits: torch.Tensor) -> str:
    return f"{logits.shape[0]} × {logits.shape[1]}"
