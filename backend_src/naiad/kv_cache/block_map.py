"""The map of a KV group's blocks by state, for people who watch the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from naiad.snapshot import CACHED, FREE, MAX_CELLS, SHARED, USED, BlockMap

_STATES = (FREE, CACHED, USED, SHARED)
# Reference count → state.
_BY_COUNT = bytes([FREE, USED]) + bytes([SHARED]) * 254
# Stands behind the last block where the last cell is not full.
_NO_STATE = 255


def block_map(ref_counts: Sequence[int], cached_ids: Iterable[int], window: int | None) -> BlockMap:
    """Describe the blocks of one pool, which may have hundreds of thousands.

    Args:
        ref_counts: for each block, how many sequences hold it.
        cached_ids: the blocks that the prefix cache refers to, held or not.
        window: the group's window.
    """
    try:
        counts = bytes(ref_counts)
    except ValueError:
        counts = bytes(map(min, ref_counts, repeat(255)))
    states = np.frombuffer(bytearray(counts.translate(_BY_COUNT)), np.uint8)
    cached = np.fromiter(cached_ids, np.int64)
    states[cached[states[cached] == FREE]] = CACHED
    num_free, num_cached, num_used, num_shared = (int(each) for each in np.bincount(states, minlength=4))
    width = -(-len(states) // MAX_CELLS)
    cells = states if width == 1 else _summed(states, width)
    return BlockMap(window, num_free, num_cached, num_used, num_shared, width, cells.tobytes())


def _summed(states: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    num_missing = -len(states) % width
    cells = np.pad(states, (0, num_missing), constant_values=_NO_STATE).reshape(-1, width)
    # argmax takes the first of equals, so the largest state comes first.
    counts = np.stack([(cells == state).sum(axis=1) for state in reversed(_STATES)])
    found: npt.NDArray[np.uint8] = (SHARED - counts.argmax(axis=0)).astype(np.uint8)
    return found
