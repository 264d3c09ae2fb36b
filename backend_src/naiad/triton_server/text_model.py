"""The `text` model: a prompt's text in, text out, in one process and without an ensemble's hops."""

from __future__ import annotations

from collections.abc import Mapping

from naiad.tokenization import Tokenizer
from naiad.triton_server.door_model import DoorModel
from naiad.triton_server.model_parameters import read_bool
from naiad.triton_server.request_shape import RequestShape
from naiad.triton_server.text_reader import TextReader
from naiad.triton_server.text_request import TextRequestReader
from naiad.triton_server.text_responses import TextResponses


class TextModel(DoorModel):
    """The fields, texts and errors of the ensemble."""

    KEYS = ("exclude_input_in_output", "accumulate_tokens")

    def make_shape(
        self, texts: TextReader, tokenizer: Tokenizer, parameters: Mapping[str, str]
    ) -> RequestShape:
        """As `DoorModel.make_shape`."""
        responses = TextResponses(
            tokenizer.table,
            skip_special_tokens=read_bool(parameters, "skip_special_tokens", default=True),
            accumulates=read_bool(parameters, "accumulate_tokens", default=False),
        )
        return RequestShape(read=TextRequestReader(texts).read, build=responses.build, has_detokenizer=False)
