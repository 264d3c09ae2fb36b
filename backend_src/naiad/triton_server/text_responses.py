"""Responses that hold text, made in the process that has the request."""

from __future__ import annotations

import numpy as np

from naiad.outputs import RequestOutput
from naiad.tokenization import TokenTable
from naiad.triton_server.chunk_text import chunk_outputs
from naiad.triton_server.response_stream import ResponseStream, StreamRow, Tensors
from naiad.triton_server.response_tensors import response_tensors

_DETOKENIZER_NAMES = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}


class TextResponses:
    """Makes the ensemble's outputs of a chunk: those of `llm`, through the `detokenizer`'s hands."""

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool, accumulates: bool) -> None:
        """Take the model's parameters.

        Args:
            table: the checkpoint's tokens.
            skip_special_tokens: they make no text.
            accumulates: each streamed response holds all of its sequence's text so far.
        """
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._accumulates = accumulates

    def build(self, stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> Tensors:
        """The response; see `ResponseBuilder`."""
        outputs = self._outputs(stream, row, chunk)
        text = outputs.pop("OUTPUT")
        if self._accumulates and stream.request.streaming:
            row.text += text.item().decode()
            text = np.array([row.text.encode()], dtype=np.object_)
        return {"text_output": text} | outputs

    def text_of(self, stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> str:
        """The chunk's text alone."""
        return str(self._outputs(stream, row, chunk)["OUTPUT"].item().decode())

    def _outputs(self, stream: ResponseStream, row: StreamRow, chunk: RequestOutput) -> Tensors:
        made = response_tensors(stream, row, chunk)
        tensors = {_DETOKENIZER_NAMES.get(name, name): value for name, value in made.items()}
        outputs = chunk_outputs(self._table, tensors, self._skip_special_tokens)
        assert outputs is not None, "a chunk without tokens that is not the last"
        return outputs
