"""The compiled kernels as Python calls them. Every struct is the twin of one in `src/tape.h`."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any


class Kind(IntEnum):
    """What a record does."""

    EMBED = 0
    RMS_NORM = 1
    ADD = 2
    LINEAR = 3
    GATE = 4
    ANGLES = 5
    ROTARY_STORE = 6
    ATTENTION = 7
    SOFT_CAP = 8
    BEST_TOKENS = 9
    DRAW_TOKENS = 10


class Activation(IntEnum):
    """What a gate does to its first half."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3


class Product(IntEnum):
    """What a linear record multiplies: inputs by weights."""

    FLOAT_BY_FLOAT = 0
    FLOAT_BY_BF16 = 1
    BF16_BY_BF16 = 2
    INT8_BY_INT8 = 3
    FLOAT_BY_F16 = 4
    INT4_BY_INT8 = 5
    INT4_AND_MINIMUM_BY_INT8 = 6


class Element(IntEnum):
    """The dtype of a table or a cache."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Matrix(ctypes.Structure):
    """A weight in panels."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("num_panels", c_int64),
        ("in_features", c_int64),
        ("product", c_int32),
    )


class Cache(ctypes.Structure):
    """One layer's keys and values."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("element", c_int32),
    )


class Record(ctypes.Structure):
    """One step of a tape."""

    _fields_ = (
        ("kind", c_int32),
        ("in_", c_int32),
        ("other", c_int32),
        ("out", c_int32),
        ("activation", c_int32),
        ("group", c_int32),
        ("num_heads", c_int32),
        ("element", c_int32),
        ("width", c_int64),
        ("num_rows", c_int64),
        ("table", c_void_p),
        ("weight", c_void_p),
        ("frequencies", c_void_p),
        ("eps", c_float),
        ("factor", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("matrix", Matrix),
        ("cache", Cache),
    )

    def __init__(self, **fields: Any) -> None:
        """Make a record; fields that are not named are zero.

        ctypes cuts numbers to the width of their fields silently, so each is compared with what is kept.

        Raises:
            ValueError: a whole number has more than 32 or 64 bits, or a float is beyond float32.
        """
        super().__init__(**fields)
        for name, value in fields.items():
            kept = getattr(self, name)
            if isinstance(kept, int) and kept != value:
                raise ValueError(f"{name} = {value} does not fit into a record")
            if isinstance(kept, float) and math.isfinite(value) and not math.isfinite(kept):
                raise ValueError(f"{name} = {value} is beyond float32")


class Buffer(ctypes.Structure):
    """Rows of float32."""

    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Tables(ctypes.Structure):
    """Block tables of one group of layers."""

    _fields_ = (("blocks", c_void_p), ("stride", c_int64))


class StepDraws(ctypes.Structure):
    """How each row draws its token."""

    _fields_ = (
        ("temperatures", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("log_min_p", c_void_p),
        ("keys", c_void_p),
        ("token_ids", c_void_p),
    )


class Step(ctypes.Structure):
    """What a call computes."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("tables", POINTER(Tables)),
        ("num_groups", c_int64),
        ("best_ids", c_void_p),
        ("best_logits", c_void_p),
        ("allowed", c_void_p),
        ("allowed_stride", c_int64),
        ("draws", POINTER(StepDraws)),
    )


# The structs whose sizes `naiad_sizes` reports, in its order.
STRUCTS = (Record, Matrix, Cache, Step, StepDraws)
_REFUSALS = {
    1: "a token id is outside the embedding",
    2: "a sequence's positions do not follow each other",
    3: "a block id is outside the KV cache",
    4: "a block table is too short for its sequence",
    5: "a bitmask of allowed tokens is shorter than the vocabulary",
}
_NO_MEMORY = 6


class Library:
    """One variant of the kernels, loaded.

    Attributes:
        name: of its file, which tells variants and releases of the kernels apart.
    """

    def __init__(self, path: Path) -> None:
        """Load it and see whether its structs are the twins of ours."""
        self.name = path.name
        self._c = ctypes.CDLL(str(path))
        self._c.naiad_team_new.restype = c_void_p
        self._c.naiad_team_new.argtypes = [c_int64]
        self._c.naiad_team_free.restype = None
        self._c.naiad_team_free.argtypes = [c_void_p]
        self._c.naiad_team_pin.argtypes = [c_void_p, POINTER(c_int32)]
        self._c.naiad_team_adapt.restype = None
        self._c.naiad_team_adapt.argtypes = [c_void_p, c_int32]
        self._c.naiad_team_size.restype = c_int64
        self._c.naiad_team_size.argtypes = [c_void_p]
        self._c.naiad_team_lose_share.restype = None
        self._c.naiad_team_lose_share.argtypes = [c_void_p]
        self._c.naiad_run.argtypes = [
            c_void_p,
            POINTER(Record),
            c_int64,
            POINTER(Buffer),
            POINTER(Step),
            POINTER(c_int64),
        ]
        sizes = (c_int64 * len(STRUCTS))()
        self._c.naiad_sizes(sizes)
        twins = [ctypes.sizeof(each) for each in STRUCTS]
        assert list(sizes) == twins, (list(sizes), twins)

    def new_team(self, num_threads: int) -> Team:
        """Threads that compute together."""
        return Team(self, num_threads)

    def run(
        self,
        team: Team,
        records: ctypes.Array[Record],
        buffers: Sequence[Buffer] | ctypes.Array[Buffer],
        step: Step,
        nanoseconds: ctypes.Array[c_int64] | None = None,
    ) -> None:
        """Run a tape.

        Args:
            team: computes it.
            records: the tape.
            buffers: those that the records name.
            step: tokens, positions and block tables.
            nanoseconds: for each record; the time that it takes is added.

        Raises:
            ValueError: the step names something that is not there; nothing has been computed.
            MemoryError: there is no memory for what the kernels need; nothing has been computed.
        """
        with team.lock:
            refusal = self._c.naiad_run(
                team.handle, records, len(records), buffers, ctypes.byref(step), nanoseconds
            )
        if refusal == _NO_MEMORY:
            raise MemoryError(f"there is no memory for the native kernels' step of {step.num_tokens} tokens")
        if refusal:
            raise ValueError(_REFUSALS[refusal])


class Team:
    """Threads of a library; they sleep between steps.

    Attributes:
        handle: what the library knows it by.
        lock: held while it computes.
        library: whose they are.
        num_threads: with the one that calls; a step may have fewer.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start the threads.

        Raises:
            OSError: the system starts no more threads.
        """
        assert num_threads >= 1, num_threads
        self.library = library
        self.num_threads = num_threads
        self.lock = threading.Lock()
        self.handle: int | None = library._c.naiad_team_new(num_threads)
        if not self.handle:
            raise OSError(f"{num_threads} threads cannot be started")

    @property
    def size(self) -> int:
        """Number of threads that compute the next step."""
        return int(self.library._c.naiad_team_size(self.handle))

    def pin(self, cpus: Sequence[int]) -> None:
        """Give each thread a core of its own.

        Args:
            cpus: ids of cores, one for each thread; the first is for the thread that runs tapes, which
                goes there at its first run.

        Raises:
            OSError: a core may not be used.
        """
        assert len(cpus) == self.num_threads, (cpus, self.num_threads)
        error = self.library._c.naiad_team_pin(self.handle, (c_int32 * len(cpus))(*cpus))
        if error:
            raise OSError(error, f"threads cannot be pinned to the cores {cpus}: {os.strerror(error)}")

    def adapt(self, adapts: bool) -> None:
        """Whether steps have fewer threads while other programs use their cores; at first they do not."""
        with self.lock:
            self.library._c.naiad_team_adapt(self.handle, adapts)

    def lose_share(self) -> None:
        """Make the next step of two threads or more hang, for tests of what watches over steps."""
        with self.lock:
            self.library._c.naiad_team_lose_share(self.handle)

    def __del__(self) -> None:
        """End the threads."""
        if getattr(self, "handle", None):
            self.library._c.naiad_team_free(self.handle)
