"""The `text` model: takes and returns text in one process, without the steps of an ensemble."""

from __future__ import annotations

from collections.abc import Mapping

from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.prompt import PromptEncoder
from naiad.triton_server.models.parameters import read_bool
from naiad.triton_server.models.text_frontend import TextFrontend
from naiad.triton_server.requests.text import TextRequestReader
from naiad.triton_server.responses.text import TextWriter
from naiad.triton_server.service.llm_service import RequestShape


class TextModel(TextFrontend):
    """Has the same fields, texts and errors as the ensemble."""

    KIND = "text"

    def make_shape(self, encoder: PromptEncoder, parameters: Mapping[str, str]) -> RequestShape:
        """See `TextFrontend.make_shape`."""
        writer = TextWriter(
            ChunkTexts(encoder.tokenizer.table),
            accumulates=read_bool(parameters, "accumulate_tokens", default=False),
        )
        return RequestShape(read=TextRequestReader(encoder).read, build=writer.write)
