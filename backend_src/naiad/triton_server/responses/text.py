"""The text level's writer: turns chunks into text."""

from __future__ import annotations

import numpy as np

from naiad.frontend.chunks import Chunk, ChunkTexts
from naiad.triton_server.responses.details import detail_tensors
from naiad.triton_server.responses.stream import StreamRow, Tensors


class TextWriter:
    """Turns a chunk into the outputs that the ensemble has."""

    def __init__(self, texts: ChunkTexts, *, accumulates: bool) -> None:
        """Set up.

        Args:
            texts: turns tokens into text.
            accumulates: whether each streamed response holds all of its sequence's text so far.
        """
        self._texts = texts
        self._accumulates = accumulates

    def write(self, row: StreamRow, chunk: Chunk) -> Tensors:
        """Return the response; see `ResponseBuilder`.

        Returns:
            text_output [k] strings, one for each beam, without a batch dimension, as clients of
            TensorRT-LLM's backend read it (`[0]` is the text); and the tensors of `detail_tensors`.
        """
        texts = self._texts.of(chunk)
        if self._accumulates and chunk.request.streaming:
            row.text += texts[0]
            texts = [row.text]
        tensors: Tensors = {"text_output": np.array([text.encode() for text in texts], dtype=np.object_)}
        return tensors | detail_tensors(chunk)
