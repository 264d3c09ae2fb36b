"""Compares the logits of two checkpoints over a text, with the engine that will serve them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.kv_pool import block_bytes
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams

BLOCK_SIZE = 64


@dataclass(slots=True)
class Quality:
    """Sums over the tokens of a text.

    Attributes:
        num_tokens: tokens that were predicted.
        loss: negative log-likelihoods of the tokens that follow, in nats.
        kl: Kullback-Leibler divergences from the expected distributions, in nats.
        num_same: tokens after which the most likely next token is the expected one.
    """

    num_tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    num_same: int = 0

    def add(self, logits: torch.Tensor, expected: torch.Tensor, following: torch.Tensor) -> None:
        """Add some tokens: logits `[num_tokens, vocab_size]` float32, and the ids that follow."""
        log_probs, wanted = logits.log_softmax(1), expected.log_softmax(1)
        self.num_tokens += len(following)
        self.loss -= log_probs.gather(1, following[:, None]).sum().item()
        self.kl += (wanted.exp() * (wanted - log_probs)).sum().item()
        self.num_same += int((logits.argmax(1) == expected.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.loss / self.num_tokens)

    @property
    def mean_kl(self) -> float:
        """Nats for each token."""
        return self.kl / self.num_tokens

    @property
    def same_fraction(self) -> float:
        """How often the most likely token is the expected one, 0 to 1."""
        return self.num_same / self.num_tokens


def compared(source: Path, target: Path, texts: Sequence[list[int]]) -> tuple[Quality, Quality]:
    """Measure a checkpoint and its quantised copy, both in float32 on the CPU, one after the other.

    Args:
        source: what is expected.
        target: the copy.
        texts: contexts of at least two tokens; their logits are kept on disk meanwhile.

    Returns:
        The source's figures, and the copy's.

    Raises:
        NaiadError: one of them cannot be loaded.
    """
    before, after = Quality(), Quality()
    with tempfile.TemporaryDirectory(prefix="naiad-quality-") as folder:
        kept = [Path(folder) / f"{number}.npy" for number in range(len(texts))]
        for path, text, logits in zip(kept, texts, _logits_of(source, texts), strict=True):
            before.add(logits[:-1], logits[:-1], torch.tensor(text[1:]))
            np.save(path, logits[:-1].numpy())
        for path, text, logits in zip(kept, texts, _logits_of(target, texts), strict=True):
            after.add(logits[:-1], torch.from_numpy(np.load(path)), torch.tensor(text[1:]))
    return before, after


def logits_of_text(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    """Compute the logits `[num_tokens, vocab_size]` after each token of a context.

    Args:
        runner: has blocks of `BLOCK_SIZE` tokens and a budget of at least the text's tokens.
        text: the context's tokens.
    """
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    blocks = list(range(_num_blocks(len(text))))
    output = runner.run(lone_step([LoneRow(0, text, 0, blocks, params)]))
    return torch.frombuffer(bytearray(output.context_logits[0]), dtype=torch.float32).view(len(text), -1)


def _num_blocks(num_tokens: int) -> int:
    """So many tokens, and the one that comes next."""
    return num_tokens // BLOCK_SIZE + 1


def _logits_of(checkpoint: Path, texts: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    longest = max(map(len, texts))
    config = EngineConfig(
        model_dir=str(checkpoint),
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=max(32, longest),
        block_size=BLOCK_SIZE,
        start_cache=False,
    )
    sizes = block_bytes(config, [ModelConfig.from_directory(checkpoint)], torch.float32)
    runner = ModelRunner(replace(config, kv_cache_bytes=_num_blocks(longest) * sum(sizes)))
    for text in texts:
        yield logits_of_text(runner, text)
