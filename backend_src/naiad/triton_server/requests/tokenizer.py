"""Turns the `tokenizer` model's input tensors into its output tensors, without using Triton."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from naiad.frontend.field import Frontend
from naiad.frontend.fields import FIELD, fields_at
from naiad.frontend.prompt import EncodedPrompt, PromptEncoder
from naiad.frontend.request import required
from naiad.tokenization import pack_word_list
from naiad.triton_server.requests.tensors import (
    RequestSource,
    refuse_unknown_parameters,
    refuse_unserved,
    sent_rows,
)
from naiad.triton_server.requests.text import num_rows

_FIELDS = fields_at(Frontend.TOKENIZER)

_encode_json = msgspec.json.Encoder().encode
Tensors = dict[str, npt.NDArray[Any]]


class TokenizerReader:
    """Turns a request's text into the outputs of the `tokenizer` model."""

    def __init__(self, encoder: PromptEncoder, forwarded_headers: str = "") -> None:
        """Set up.

        Args:
            encoder: turns prompts and words into token ids.
            forwarded_headers: regular expression of the header names that the server forwards as parameters;
                "" = none.
        """
        self._encoder = encoder
        self._forwarded_headers = forwarded_headers

    def read(self, source: RequestSource, received_s: float = 0.0) -> Tensors:
        """Check and tokenize the rows of a request.

        Args:
            source: the request.
            received_s: when it came, on the monotonic clock, for `llm` to know; 0 = unknown.

        Returns:
            The outputs of the `tokenizer` model; rows are padded to the longest one.

        Raises:
            InvalidRequestError: a row is invalid; it refuses the whole request.
        """
        tensors, parameters = source.tensors(), source.parameters()
        refuse_unknown_parameters(parameters, Frontend.TOKENIZER, self._forwarded_headers)
        refuse_unserved(tensors, _FIELDS)
        rows = sent_rows(tensors, parameters, Frontend.TOKENIZER, num_rows(tensors))
        # Checked here too: if it is missing, the ensemble's next step never runs and the client gets no
        # error.
        max_tokens = [FIELD["max_tokens"].check(required(row, "max_tokens")) for row in rows]
        written = [self._encoder.check(row) for row in rows]
        prompts = [self._encoder.encode(each) for each in written]
        tokenizer = self._encoder.tokenizer
        return self._prompt_outputs(prompts, received_s) | {
            "REQUEST_OUTPUT_LEN": _column(max_tokens),
            "OUT_END_ID": self._id_column("end_id", rows, tokenizer.eos_id),
            "OUT_PAD_ID": self._id_column("pad_id", rows, tokenizer.pad_id),
            "STOP_WORDS_IDS": _packed([self._encoder.encode_words(each.stop_words) for each in written]),
            "BAD_WORDS_IDS": _packed([[list(word) for word in each.bad_words] for each in prompts]),
            "EMBEDDING_BIAS": _dense(prompts, self._encoder.vocab_size),
        }

    def _prompt_outputs(self, prompts: list[EncodedPrompt], received_s: float) -> Tensors:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        pad_id = self._encoder.tokenizer.pad_id or 0
        input_ids = np.full((len(prompts), max(lengths)), pad_id, dtype=np.int32)
        for row, prompt in zip(input_ids, prompts, strict=True):
            row[: len(prompt.token_ids)] = prompt.token_ids
        contexts = [[_context(prompt, received_s)] for prompt in prompts]
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": _column(lengths),
            # Read by clients that chain the models and also support encoder-decoder models.
            "DECODER_INPUT_ID": np.full((len(prompts), 1), pad_id, dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((len(prompts), 1), dtype=np.int32),
            "text_context": np.array(contexts, dtype=np.object_),
        }

    def _id_column(self, name: str, rows: list[dict[str, Any]], default: int | None) -> npt.NDArray[np.int32]:
        """The ids that were sent, or else the tokenizer's own."""
        known = self._encoder.known_id(default)
        return _column([FIELD[name].check(row[name]) if name in row else known for row in rows])


def _context(prompt: EncodedPrompt, received_s: float) -> bytes:
    text = prompt.text and msgspec.structs.replace(prompt.text, received_s=received_s)
    return _encode_json(text)


def _column(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32).reshape(-1, 1)


def _dense(prompts: list[EncodedPrompt], vocab_size: int) -> npt.NDArray[np.float32]:
    """The biases as a tensor [rows, vocab_size]; [rows, 0] if no row has any."""
    if not any(prompt.biases for prompt in prompts):
        return np.zeros((len(prompts), 0), dtype=np.float32)
    dense = np.zeros((len(prompts), vocab_size), dtype=np.float32)
    for target, prompt in zip(dense, prompts, strict=True):
        for token_id, value in prompt.biases:
            target[token_id] = value
    return dense


def _packed(rows: list[list[list[int]]]) -> npt.NDArray[np.int32]:
    """Each row's id sequences in the packed form [rows, 2, n], padded to the longest row."""
    packed = [pack_word_list(words) for words in rows]
    width = max(each.shape[1] for each in packed)
    filled = np.zeros((len(packed), 2, width), dtype=np.int32)
    filled[:, 1] = -1
    for target, each in zip(filled, packed, strict=True):
        target[:, : each.shape[1]] = each
    return filled
