"""A request of a model that takes text itself, read as the ensemble's steps read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from naiad.triton_server.request_fields import SERVED, Array
from naiad.triton_server.request_limits import ModelLimits
from naiad.triton_server.request_reader import (
    GenerateRequest,
    RequestSource,
    StopRequest,
    asks_to_stop,
    read_request,
    stop_request,
)
from naiad.triton_server.text_reader import TextReader

# The ensemble's wiring: its inputs as the tokenizer knows them, and the tokenizer's outputs as llm does.
TOKENIZER_NAMES: Mapping[str, str] = {
    "text_input": "QUERY",
    "messages": "messages",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "decoder_text_input": "DECODER_QUERY",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
TOKENIZED_NAMES: Mapping[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "text_context": "text_context",
}
LLM_NAMES: Mapping[str, str] = {field.name: field.tensor for field in SERVED if field.tensor}


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A request whose tensors were made from another's; see `RequestSource`."""

    request_id: str
    timeout_us: int
    sent_parameters: Mapping[str, Any]
    made_tensors: Mapping[str, Array]

    def parameters(self) -> Mapping[str, Any]:
        """The request parameters."""
        return self.sent_parameters

    def tensors(self) -> Mapping[str, Array]:
        """The input tensors by name, batch dimension included."""
        return self.made_tensors


class TextRequestReader:
    """Tokenizes a request and reads it as `llm` does."""

    def __init__(self, texts: TextReader) -> None:
        """Take the first step's reader."""
        self._texts = texts

    def read(self, source: RequestSource, limits: ModelLimits) -> GenerateRequest | StopRequest:
        """Check everything that was sent and build the rows.

        Raises:
            InvalidRequestError: one bad row refuses the whole request.
        """
        tensors, parameters = source.tensors(), source.parameters()
        if asks_to_stop(tensors, parameters):
            return stop_request(source.request_id)
        texts = {TOKENIZER_NAMES[name]: value for name, value in tensors.items() if name in TOKENIZER_NAMES}
        tokenized = self._texts.read(ReadSource(source.request_id, source.timeout_us, parameters, texts))
        made = {
            LLM_NAMES.get(name, name): value for name, value in tensors.items() if name not in TOKENIZER_NAMES
        }
        made |= {inner: tokenized[name] for name, inner in TOKENIZED_NAMES.items()}
        return read_request(ReadSource(source.request_id, source.timeout_us, parameters, made), limits)
