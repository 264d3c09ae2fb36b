"""A tape with all its memory as a file, for the driver that replays it without Python."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from naiad_kernels.best_tokens import BestTokens
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.native.library import Library, Step, StepDraws, Tables
from naiad_kernels.native.recorder import Recording
from naiad_kernels.native.tables import NativeTables
from naiad_kernels.native.tape import Tape

REPLAY_SOURCE = Path(__file__).parents[1] / "native" / "driver" / "replay.cpp"


@dataclass(frozen=True, slots=True)
class _Region:
    """Memory that a tape points into."""

    address: int
    num_bytes: int

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.num_bytes)


class _Pointers(ctypes.Structure):
    """Structs that a step points to."""

    _fields_ = (("tables", Tables), ("draws", StepDraws))


class TapeFile:
    """One step of a tape.

    The file has the structs as they are in memory, and every region with its address. The driver puts regions
    elsewhere and changes each word of the structs that lies in one of them.
    """

    def __init__(
        self,
        recording: Recording,
        library: Library,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tables: NativeTables,
        draws: Draws,
    ) -> None:
        """Lay the step out in memory; nothing is computed yet."""
        self._library = library
        self._tape = Tape(recording, library.new_team(1))
        self._tape._reserve(len(token_ids))
        best = BestTokens(torch.zeros(len(token_ids), dtype=torch.int64), torch.zeros(len(token_ids)))
        self._kept = (recording, token_ids, positions, tables, draws, best)
        filters = draws.filters
        drawn = (filters.temperature, filters.top_k, filters.top_p, filters.log_min_p)
        drawn += (draws.keys, draws.token_ids)
        self._pointers = _Pointers(
            Tables(tables.blocks.buffer_info()[0], tables.stride),
            StepDraws(*(each.data_ptr() for each in drawn)),
        )
        self._step = Step(
            num_tokens=len(token_ids),
            num_seqs=len(tables.query_starts) - 1,
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            query_starts=tables.query_starts.buffer_info()[0],
            tables=ctypes.pointer(self._pointers.tables),
            num_groups=1,
            best_ids=best.token_ids.data_ptr(),
            best_logits=best.logits.data_ptr(),
            draws=ctypes.pointer(self._pointers.draws),
        )
        tensors = [token_ids, positions, *drawn, best.token_ids, best.logits]
        tensors += [*recording.kept, *self._tape._memory]
        regions = {each.data_ptr(): _Region(each.data_ptr(), each.nbytes) for each in tensors}
        arrays = (tables.query_starts, tables.blocks)
        self._regions = [
            *regions.values(),
            *(_Region(each.buffer_info()[0], len(each) * each.itemsize) for each in arrays),
            _Region(ctypes.addressof(self._pointers), ctypes.sizeof(self._pointers)),
        ]

    def write(self, path: Path) -> None:
        """Write the step as it is before it is computed."""
        structs: Sequence[ctypes.Array | ctypes.Structure] = (
            self._tape._records,
            self._tape._buffers,
            self._step,
        )
        with path.open("wb") as file:
            for each in structs:
                file.write(struct.pack("<q", ctypes.sizeof(each)) + bytes(each))
            file.write(struct.pack("<q", len(self._regions)))
            for region in self._regions:
                file.write(struct.pack("<qq", region.address, region.num_bytes) + region.read())

    def computed(self) -> int:
        """Compute the step; the checksum of all memory but the pointers afterwards."""
        team = self._tape._team
        self._library.run(team, self._tape._records, self._tape._buffers, self._step)
        checksum = 0
        for region in self._regions[:-1]:
            checksum = zlib.crc32(region.read(), checksum)
        return checksum
