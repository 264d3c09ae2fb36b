"""How a product is divided into programs; fixed, because tuning while serving would stall requests.

The tiles were chosen from compiled code: they spill no registers on the shapes of the compile gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from naiad_kernels.linear.quantised.weights import SPAN

HOPPER = 90

# One token's product is split into two programs for each multiprocessor of an H100.
_PROGRAMS = 264
_ENOUGH_PROGRAMS = _PROGRAMS // 2
_MAX_CHUNKS = 16
_MIN_CHUNK = 2 * SPAN
_CHUNK_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """The sizes of a program's tile, its number of warps, and the number of tiles in flight."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is computed.

    Attributes:
        tile: the tile of each program.
        chunk_size: number of inputs whose sum is added to the total at once.
        num_chunks: number of chunks of the inputs.
        is_split: each chunk has its own programs, and a second launch adds the chunks' sums.
    """

    tile: Tile
    chunk_size: int
    num_chunks: int
    is_split: bool

    def num_tiles(self, num_rows: int, out_features: int) -> int:
        """Number of tiles of an output of this size."""
        return -(-num_rows // self.tile.rows) * -(-out_features // self.tile.columns)


def plan_product(tile: Tile, num_rows: int, in_features: int, out_features: int) -> Plan:
    """Divide a product of `num_rows` tokens into tiles of this size.

    The chunks depend on the layer alone, so a token's sum does not depend on the number of tokens in the
    step; they get programs of their own only if there would be too few programs otherwise.
    For a 4096 × 4096 layer there are 8 chunks of 512 inputs, and 256 programs for one token.
    """
    wanted = min(_PROGRAMS // -(-out_features // _CHUNK_COLUMNS), in_features // _MIN_CHUNK, _MAX_CHUNKS)
    power = 1 << (max(wanted, 1).bit_length() - 1)
    chunk_size = -(-in_features // (power * SPAN)) * SPAN
    whole = Plan(tile, chunk_size, -(-in_features // chunk_size), is_split=False)
    if whole.num_chunks == 1 or whole.num_tiles(num_rows, out_features) >= _ENOUGH_PROGRAMS:
        return whole
    return Plan(tile, chunk_size, whole.num_chunks, is_split=True)


def w4_tile(num_rows: int, element_bytes: int, capability: int) -> Tile:
    """The tile for four-bit weights and activations of `element_bytes`; `capability` is 90 for sm_90."""
    if element_bytes > 2:
        return Tile(16, 32, SPAN, 4, 1)
    if num_rows <= 32:
        return Tile(16 if num_rows <= 16 else 32, 128, SPAN, 4, 3)
    if num_rows <= 64 or capability < HOPPER:
        return Tile(64, 128, SPAN, 8, 3)
    return Tile(128, 64, SPAN, 8, 3)


def byte_tile(num_rows: int, element_bytes: int, capability: int, has_groups: bool = False) -> Tile:
    """The tile for one-byte weights and activations of `element_bytes`; `capability` is 90 for sm_90.

    Groups that are scaled need a third sum in registers, beside those of a chunk and of all chunks.
    """
    if element_bytes > 2:
        return Tile(16, 32, 32, 4, 2)
    if num_rows <= 16:
        return Tile(16, 64, SPAN, 4, 4)
    if num_rows <= 32:
        return Tile(32, 128, SPAN, 4, 3)
    if capability < HOPPER:
        return Tile(64, 128, SPAN, 8, 3)
    columns = 64 if has_groups else 128
    return Tile(64, columns, SPAN, 4, 3) if num_rows <= 64 else Tile(128, columns, SPAN, 8, 3)
