"""The tensor `text_chunk`: what the detokenizer needs of a chunk that more follow, in one piece.

Each tensor that passes an ensemble costs processor time in the server and in both models, so what would be
four of them travels as one: the sequence id, the number of new ids, and the ids that the text depends on, the
new ones last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from naiad.errors import InvalidRequestError
from naiad.triton_server.requests.tensors import Array

TEXT_CHUNK = "text_chunk"


@dataclass(frozen=True, slots=True)
class ShortChunk:
    """New tokens of a sequence that goes on.

    Attributes:
        sequence_id: the engine's id of the sequence.
        ids: the ids that the text depends on, the new ones last.
        num_new: how many of them are new; the others are text already.
    """

    sequence_id: int
    ids: Sequence[int]
    num_new: int

    @property
    def is_probe(self) -> bool:
        """Whether it brings nothing and only asks whether the client is still there."""
        return not self.ids

    @property
    def num_before(self) -> int:
        """How many of the ids are text already."""
        return len(self.ids) - self.num_new

    @classmethod
    def read(cls, tensor: Array) -> ShortChunk:
        """Read a tensor, which any client may have sent.

        Args:
            tensor: [1, n] int64.

        Raises:
            InvalidRequestError: it is none that `tensor` returns.
        """
        values: list[int] = tensor.reshape(-1).tolist()
        if len(tensor) != 1 or len(values) < 2 or values[0] < 0 or not 0 <= values[1] <= len(values) - 2:
            raise InvalidRequestError(
                f"{TEXT_CHUNK} has shape {list(tensor.shape)} and begins with {values[:2]}: expected one row "
                "of a sequence id, the number of new ids, and at least as many ids"
            )
        return cls(values[0], values[2:], values[1])

    def tensor(self) -> Array:
        """Return the tensor, [1, 2 + number of ids] int64."""
        return np.array([[self.sequence_id, self.num_new, *self.ids]], dtype=np.int64)
