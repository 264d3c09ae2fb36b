"""Sequences that take over what another one has computed."""

from __future__ import annotations

from collections.abc import Container

from naiad.sequence import Sequence, SequenceStatus


def can_start(sequence: Sequence, newcomers: Container[int]) -> bool:
    """Whether a waiting sequence could start now: not one that will share what its donor has yet to compute.

    What a donor that has just been admitted has from the prefix cache may be written in this very
    step, and then it is too early to copy it.

    Args:
        sequence: the one.
        newcomers: ids of those that the step that is being made has admitted.
    """
    donor = sequence.donor
    return (
        donor is None
        or donor.status is not SequenceStatus.RUNNING
        or sequence.num_preemptions > 0
        or (donor.num_computed_tokens >= sequence.num_tokens - 1 and donor.sequence_id not in newcomers)
    )
