"""Sampling: drawing tokens from logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from perf.kernels.cases import Case, Rival, equals, num_bytes, optional_module
from perf.kernels.sizes import Sizes

from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.gumbel_argmax import reference as gumbel_reference
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.kept_threshold import reference as threshold_reference

_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.95


def sampling_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Each op for each number of rows."""
    for num_rows in sizes.num_rows:
        logits = torch.randn(num_rows, sizes.vocab_size, device=device) * 3
        yield _draw(logits, is_filtered=False)
        yield _draw(logits, is_filtered=True)


def _draw(logits: torch.Tensor, is_filtered: bool) -> Case:
    """From logits to a token: the best logit, the filters' threshold, and the draw."""
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
    """Rivals draw with their own noise, so their tokens may differ."""
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


def _shape(logits: torch.Tensor) -> str:
    return f"{logits.shape[0]} × {logits.shape[1]}"
