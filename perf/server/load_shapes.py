"""How many users there are at a moment of a run."""

from __future__ import annotations

_NUM_STEPS = 4


def users_at(time_s: float, run_time_s: float, most: int, shape: str) -> int | None:
    """Users at a moment of the run; None: it has ended.

    Args:
        time_s: since its start.
        run_time_s: of the run.
        most: users.
        shape: "steady", or "ramp": a quarter of them more in each quarter of the run.
    """
    if time_s >= run_time_s:
        return None
    if shape == "steady":
        return most
    step = int(_NUM_STEPS * time_s / run_time_s) + 1
    return -(-most * step // _NUM_STEPS)
