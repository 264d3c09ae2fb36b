"""The number of users over the time of a run."""

from __future__ import annotations

_NUM_STEPS = 4


def users_at(time_s: float, run_time_s: float, most: int, shape: str) -> int | None:
    """Number of users at a moment of the run; None: the run has ended.

    Args:
        time_s: seconds since the start.
        run_time_s: duration of the run.
        most: maximum number of users.
        shape: "steady", or "ramp": another quarter of the users starts in each quarter of the run.
    """
    if time_s >= run_time_s:
        return None
    if shape == "steady":
        return most
    step = int(_NUM_STEPS * time_s / run_time_s) + 1
    return -(-most * step // _NUM_STEPS)
