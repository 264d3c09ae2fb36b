"""From the `tokenizer` model's inputs to token ids and what the later steps need. No Triton here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidRequestError
from naiad.sequence import TextContext
from naiad.tokenization import Tokenizer
from naiad.triton_server.request_fields import (
    Array,
    decoded,
    num_utf8_bytes,
    read_scalars,
    refuse_unknown_parameters,
    required,
    split_rows,
)
from naiad.triton_server.request_limits import MAX_BAD_WORDS, MAX_PROMPT_BYTES_PER_TOKEN, MAX_STOP_WORDS
from naiad.triton_server.request_reader import KNOWN_PARAMETERS, RequestSource
from naiad.triton_server.unserved_fields import refuse_unserved
from naiad.triton_server.word_fields import embedding_bias, pack_rows, read_word_weights, read_words

# The tokenizer model's own names of fields that `request_fields` knows by the text level's.
_REFERENCE_NAMES = {
    "DECODER_QUERY": "decoder_text_input",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
_IMAGE_INPUTS = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "IMAGES")

_encode_json = msgspec.json.Encoder().encode


class TextReader:
    """Turns one request's text into the tensors of the `tokenizer` model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        *,
        add_special_tokens: bool,
        skip_special_tokens: bool,
        forwarded_headers: str,
    ) -> None:
        """Take the tokenizer and the model's parameters.

        Args:
            tokenizer: the checkpoint's.
            max_model_len: bounds a prompt's bytes.
            vocab_size: of the model, which may be larger than the tokenizer's.
            add_special_tokens: to `text_input`.
            skip_special_tokens: they make no text.
            forwarded_headers: regular expression of header names; "" = none.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompt_bytes = MAX_PROMPT_BYTES_PER_TOKEN * max_model_len
        self._add_special_tokens = add_special_tokens
        self._skip_special_tokens = skip_special_tokens
        self._forwarded_headers = forwarded_headers

    def read(self, source: RequestSource) -> dict[str, npt.NDArray[Any]]:
        """Check and tokenize all rows.

        Returns:
            The outputs of the `tokenizer` model; rows are padded to the longest.

        Raises:
            InvalidRequestError: one bad row refuses the whole request.
        """
        tensors, parameters = source.tensors(), source.parameters()
        refuse_unknown_parameters(parameters, KNOWN_PARAMETERS, self._forwarded_headers)
        refuse_unserved({_REFERENCE_NAMES.get(name, name): value for name, value in tensors.items()})
        for name in _IMAGE_INPUTS:
            if name in tensors:
                raise InvalidRequestError(f"{name} is not supported by this version of Naiad: do not send it")
        num_rows = _num_rows(tensors)
        max_tokens = _max_tokens(tensors, parameters, num_rows)
        prompts = self._prompts(tensors, parameters, num_rows)
        stop_words = read_words(
            "stop_words",
            tensors.get("STOP_WORDS_DICT"),
            parameters.get("stop_words"),
            num_rows,
            MAX_STOP_WORDS,
        )
        outputs = self._prompt_outputs(prompts, stop_words, max_tokens)
        outputs |= self._id_outputs(tensors, parameters, num_rows)
        return outputs | self._logit_outputs(tensors, parameters, num_rows)

    def _prompts(
        self, tensors: Mapping[str, Array], parameters: Mapping[str, Any], num_rows: int
    ) -> list[list[int]]:
        texts = _strings("text_input", tensors.get("QUERY"), parameters.get("text_input"), num_rows)
        chats = _strings("messages", tensors.get("messages"), parameters.get("messages"), num_rows)
        if (texts is None) == (chats is None):
            both = "both" if texts is not None else "neither"
            raise InvalidRequestError(f"expected either text_input or messages: {both} was sent")
        for text in texts or chats or []:
            num_bytes = num_utf8_bytes("the prompt", text)
            if num_bytes > self._max_prompt_bytes:
                raise InvalidRequestError(
                    f"the prompt has {num_bytes} bytes: at most {self._max_prompt_bytes} are allowed"
                )
        if texts is not None:
            if not all(texts):
                raise InvalidRequestError("text_input is empty: expected at least one character")
            return [
                self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens) for text in texts
            ]
        return [self._tokenizer.render_chat(chat) for chat in chats or []]

    def _prompt_outputs(
        self, prompts: list[list[int]], stop_words: list[list[str]], max_tokens: list[int]
    ) -> dict[str, npt.NDArray[Any]]:
        num_rows = len(prompts)
        lengths = [len(prompt) for prompt in prompts]
        pad_id = self._tokenizer.pad_id or 0
        input_ids = np.full((num_rows, max(lengths)), pad_id, dtype=np.int32)
        for row, prompt in zip(input_ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": np.array(lengths, dtype=np.int32).reshape(-1, 1),
            "REQUEST_OUTPUT_LEN": np.array(max_tokens, dtype=np.int32).reshape(-1, 1),
            "STOP_WORDS_IDS": pack_rows(
                [
                    [self._tokenizer.encode(word, add_special_tokens=False) for word in words]
                    for words in stop_words
                ]
            ),
            # Read by chains that are made for encoder-decoder models too.
            "DECODER_INPUT_ID": np.full((num_rows, 1), pad_id, dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((num_rows, 1), dtype=np.int32),
            "text_context": np.array(
                [[_encode_json(self._context(p, w))] for p, w in zip(prompts, stop_words, strict=True)],
                dtype=np.object_,
            ),
        }

    def _id_outputs(
        self, tensors: Mapping[str, Array], parameters: Mapping[str, Any], num_rows: int
    ) -> dict[str, npt.NDArray[Any]]:
        """What was sent, as a tensor or a parameter, or the tokenizer's own."""
        defaults = {"end_id": self._tokenizer.eos_id, "pad_id": self._tokenizer.pad_id}
        told = read_scalars({}, {name: parameters[name] for name in defaults if name in parameters})
        outputs: dict[str, npt.NDArray[Any]] = {}
        for name, default in defaults.items():
            sent = tensors.get(name.upper())
            if sent is None:
                sent = np.full((num_rows, 1), told.get(name, self._known_id(default)))
            outputs[f"OUT_{name.upper()}"] = sent.astype(np.int32)
        return outputs

    def _logit_outputs(
        self, tensors: Mapping[str, Array], parameters: Mapping[str, Any], num_rows: int
    ) -> dict[str, npt.NDArray[Any]]:
        bad_words = read_words(
            "bad_words", tensors.get("BAD_WORDS_DICT"), parameters.get("bad_words"), num_rows, MAX_BAD_WORDS
        )
        weights = read_word_weights(
            tensors.get("EMBEDDING_BIAS_WORDS"), tensors.get("EMBEDDING_BIAS_WEIGHTS"), num_rows
        )
        return {
            "BAD_WORDS_IDS": pack_rows(
                [
                    [ids for word in words for ids in self._tokenizer.encode_bad_word(word)]
                    for words in bad_words
                ]
            ),
            "EMBEDDING_BIAS": embedding_bias(self._tokenizer, weights, self._vocab_size),
        }

    def _context(self, prompt: list[int], stop_words: list[str]) -> TextContext:
        return TextContext(
            stop_strings=tuple(stop_words),
            skip_special_tokens=self._skip_special_tokens,
            prompt_tail_ids=tuple(self._tokenizer.prompt_tail(prompt)),
            num_prompt_chars=self._tokenizer.num_prompt_chars(prompt),
        )

    def _known_id(self, token_id: int | None) -> int:
        """Some tokenizers name a padding token that the model has no row for."""
        return token_id if token_id is not None and token_id < self._vocab_size else -1


def _num_rows(tensors: Mapping[str, Array]) -> int:
    for name in ("QUERY", "messages", "REQUEST_OUTPUT_LEN"):
        if name in tensors:
            return int(tensors[name].shape[0])
    return 1


def _max_tokens(tensors: Mapping[str, Array], parameters: Mapping[str, Any], num_rows: int) -> list[int]:
    """Checked here too: without it the ensemble's next step would never run, and nobody would say why."""
    sent = {"request_output_len": tensors["REQUEST_OUTPUT_LEN"]} if "REQUEST_OUTPUT_LEN" in tensors else {}
    rows = [read_scalars(row, parameters) for row in split_rows(sent, num_rows)]
    return [int(required(row, "max_tokens")) for row in rows]


def _strings(name: str, tensor: Array | None, parameter: Any, num_rows: int) -> list[str] | None:
    if tensor is None:
        if parameter is None:
            return None
        return [str(parameter)] * num_rows
    values = [decoded(name, raw) for raw in tensor.reshape(-1).tolist()]
    if len(values) != num_rows:
        raise InvalidRequestError(f"{name} has {len(values)} values for {num_rows} rows")
    return values
