"""The interface between the engine and what computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from naiad.outputs import MemoryUse, ModelOutput, ServedModel, StepBatch
from naiad.sequence import SamplingParams


class StepRunner(Protocol):
    """Computes steps, such as `naiad.model_runner.ModelRunner`."""

    @property
    def model_config(self) -> ServedModel:
        """The checkpoint's configuration."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens together."""

    @property
    def num_late_compiles(self) -> int:
        """Number of kernels compiled after the start; each of these compilations delayed a step."""

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Begin to compute a step; the previous one may still be running.

        Returns:
            A function that waits for the result and returns it. The result has ids or an error for each row
            that samples; other rows may have errors too. It must be called once, in the order of the
            launches.
        """

    def needs_ids(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can not be launched before its last id is known."""

    def memory_use(self) -> MemoryUse:
        """The memory that the process uses now."""

    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Overwrite these blocks of each KV group; used so that a failed row's KV never reaches others."""
