"""What a simulated replica is: the measured costs of its steps, and the limits of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from naiad.cli.plan.steps import Measured
from naiad.errors import ConfigError
from naiad.outputs import StepBatch


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica, as it was measured.

    Attributes:
        decode: (sequences, seconds of a step) with a short context, fewest sequences first.
        short_context: tokens in it.
        context_s: what each further token of each sequence's context adds.
        prompt_token_s: of a prompt's token, without context.
        pair_s: what each token that it attends to adds.
        overhead_s: of the engine around each step.
        max_num_seqs: slots.
        max_queued_requests: requests that wait beyond those in slots; further ones are refused.
        num_blocks, block_size: the KV cache, in blocks and tokens.
        step_tokens, context_cost, decode_cost: the scheduler's budget for a step, as in `SchedulerLimits`.
        measured: which model, on what.
    """

    decode: tuple[tuple[int, float], ...]
    short_context: int
    context_s: float
    prompt_token_s: float
    pair_s: float
    overhead_s: float
    max_num_seqs: int
    max_queued_requests: int
    num_blocks: int
    block_size: int
    step_tokens: int
    context_cost: float
    decode_cost: float
    measured: str

    def __post_init__(self) -> None:
        """Check what a damaged file would have wrong.

        Raises:
            ValueError: there are no costs, or a number is not what it must be.
        """
        costs = [seconds for _, seconds in self.decode]
        if not costs or min(costs) <= 0 or self.prompt_token_s <= 0:
            raise ValueError("decode and prompt_token_s must be above 0")
        if min(self.max_num_seqs, self.num_blocks, self.block_size, self.step_tokens) < 1:
            raise ValueError("max_num_seqs, num_blocks, block_size and step_tokens must be at least 1")

    def of(self, step: StepBatch) -> float:
        """The step's seconds: those of its rows with one token, then of the parts of prompts.

        A step without the former still reads the weights once.
        """
        costs = self.costs
        decoding = [row.start for row in step.rows if len(row.token_ids) == 1]
        prompts_s = sum(
            costs.prompt_s(row.known_end) - costs.prompt_s(row.start)
            for row in step.rows
            if len(row.token_ids) > 1
        )
        if not decoding:
            return self.overhead_s + max(prompts_s, costs.decode_s(1, 0))
        mean_context = sum(decoding) / len(decoding)
        return self.overhead_s + costs.decode_s(len(decoding), mean_context) + prompts_s

    @property
    def costs(self) -> Measured:
        """The costs as `naiad plan` has them."""
        decode: Sequence[tuple[int, float]] = self.decode
        return Measured(decode, self.short_context, self.context_s, self.prompt_token_s, self.pair_s)

    @property
    def max_model_len(self) -> int:
        """The longest text: one that fills the KV cache."""
        return self.num_blocks * self.block_size


def read_spec(path: Path) -> ReplicaSpec:
    """Read what `perf.cluster.measure` has written.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplicaSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("--costs", str(path), f"a file of perf.cluster.measure ({error})") from error
