"""What the engine needs of whatever computes a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from naiad.outputs import MemoryUse, ModelOutput, ServedModel, StepBatch
from naiad.sequence import SamplingParams


class StepRunner(Protocol):
    """What computes a step; `naiad.model_runner.ModelRunner` is one."""

    @property
    def model_config(self) -> ServedModel:
        """The checkpoint's configuration."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""

    @property
    def num_late_compiles(self) -> int:
        """Kernels that were compiled since the start: somebody waited for each."""

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Begin to compute the rows; those of the last step may be under way.

        Returns:
            What waits for the result: for each row that samples an id or an error; other rows may fail
            too. To be called once, in the order of the launches.
        """

    def needs_ids(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can not be launched before its last id is known."""

    def memory_use(self) -> MemoryUse:
        """What the process holds now."""

    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Overwrite what a failed row has left in blocks of each KV group: nothing of it may reach others."""
