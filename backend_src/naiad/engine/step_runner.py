"""What the engine needs of whatever computes a step."""

from __future__ import annotations

from typing import Protocol

from naiad.outputs import MemoryUse, ModelOutput, SchedulerOutput


class VocabularyInfo(Protocol):
    """What the engine's users need to know of the checkpoint; a `ModelConfig` has it."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""


class StepRunner(Protocol):
    """What computes a step; `naiad.model_runner.ModelRunner` is one."""

    @property
    def model_config(self) -> VocabularyInfo:
        """The checkpoint's configuration."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""

    @property
    def num_late_compiles(self) -> int:
        """Kernels that were compiled since the start: somebody waited for each."""

    def run(self, output: SchedulerOutput) -> ModelOutput:
        """Compute the rows: for each that samples an id or an error; other rows may fail too."""

    def memory_use(self) -> MemoryUse:
        """What the process holds now."""

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Overwrite what a failed row has left in KV blocks: nothing of it may reach others."""
