"""Requests that bring text: checked, tokenized, and read as `llm` reads the result. No Triton here.

`TextReader` makes the outputs of the `tokenizer` model; `TextRequestReader` is for a model that does all
steps of an ensemble itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidRequestError
from naiad.frontend.limits import (
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_PROMPT_BYTES_PER_TOKEN,
    MAX_STOP_WORDS,
    MAX_WORD_BYTES,
    ModelLimits,
)
from naiad.frontend.request import GenerateRequest, StopRequest
from naiad.sequence import TextContext
from naiad.tokenization import Tokenizer, pack_word_list
from naiad.triton_server.requests.fields import (
    SERVED,
    decoded,
    num_utf8_bytes,
    read_scalars,
    refuse_unknown_parameters,
    refuse_unserved,
    required,
    split_rows,
)
from naiad.triton_server.requests.llm import KNOWN_PARAMETERS, asks_to_stop, read_request, stop_request
from naiad.triton_server.requests.row import check_biases
from naiad.triton_server.requests.source import Array, RequestSource

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


def read_words(
    name: str, tensor: Array | None, parameter: Any, num_rows: int, max_words: int
) -> list[list[str]]:
    """Each row's words; "" is padding, as the reference's clients send it.

    Args:
        name: for messages.
        tensor: [num_rows, n] strings, or None when it was not sent.
        parameter: one word for all rows, or None.
        num_rows: of the request.
        max_words: of a row.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    if tensor is None:
        rows = [[str(parameter)] if parameter is not None else []] * num_rows
    else:
        rows = [[decoded(name, raw) for raw in row] for row in tensor.reshape(num_rows, -1).tolist()]
    rows = [[word for word in row if word] for row in rows]
    for row in rows:
        if len(row) > max_words:
            raise InvalidRequestError(f"{name} has {len(row)} entries: at most {max_words} are allowed")
        _check_lengths(name, row)
    return rows


def read_word_weights(
    words: Array | None, weights: Array | None, num_rows: int
) -> list[list[tuple[str, float]]]:
    """Each row's `embedding_bias_words` with their weights; "" is padding, whatever its weight.

    Args:
        words: [num_rows, n] strings, or None.
        weights: [num_rows, n] numbers, or None.
        num_rows: of the request.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    num_words = 0 if words is None else words.size // num_rows
    num_weights = 0 if weights is None else weights.size // num_rows
    if num_words != num_weights:
        raise InvalidRequestError(
            f"embedding_bias_words has {num_words} words and embedding_bias_weights {num_weights} "
            "weights: expected as many of each"
        )
    if words is None or weights is None:
        return [[]] * num_rows
    if num_words > MAX_BIASED_IDS:
        raise InvalidRequestError(
            f"embedding_bias_words has {num_words} entries: at most {MAX_BIASED_IDS} are allowed"
        )
    check_biases("embedding_bias_weights", weights)
    rows = []
    pairs = zip(words.reshape(num_rows, -1).tolist(), weights.reshape(num_rows, -1).tolist(), strict=True)
    for raws, values in pairs:
        texts = [decoded("embedding_bias_words", raw) for raw in raws]
        _check_lengths("embedding_bias_words", texts)
        rows.append([(text, value) for text, value in zip(texts, values, strict=True) if text])
    return rows


def embedding_bias(
    tokenizer: Tokenizer, rows: list[list[tuple[str, float]]], vocab_size: int
) -> npt.NDArray[np.float32]:
    """Each word's weight added to the logit of each of its ids, as the reference does.

    Returns:
        [num_rows, vocab_size]; [num_rows, 0] if no row has a word.

    Raises:
        InvalidRequestError: a row has too many ids, or one that the model does not have.
    """
    if not any(rows):
        return np.zeros((len(rows), 0), dtype=np.float32)
    dense = np.zeros((len(rows), vocab_size), dtype=np.float32)
    for target, row in zip(dense, rows, strict=True):
        biased = set()
        for word, weight in row:
            ids = tokenizer.encode(word, add_special_tokens=False)
            if ids and max(ids) >= vocab_size:
                raise InvalidRequestError(
                    f"embedding_bias_words makes the token {max(ids)}: expected ids in [0, {vocab_size})"
                )
            np.add.at(target, ids, weight)
            biased |= set(ids)
        if len(biased) > MAX_BIASED_IDS:
            raise InvalidRequestError(
                f"embedding_bias_words makes {len(biased)} tokens: at most {MAX_BIASED_IDS} are allowed"
            )
        check_biases("embedding_bias_weights, added up for each token,", target)
    return dense


def pack_rows(rows: list[list[list[int]]]) -> npt.NDArray[np.int32]:
    """Each row's sequences of ids in the reference's packed form, padded to the longest.

    Returns:
        [num_rows, 2, n].
    """
    packed = [pack_word_list(words) for words in rows]
    width = max(each.shape[1] for each in packed)
    filled = np.zeros((len(packed), 2, width), dtype=np.int32)
    filled[:, 1] = -1
    for target, each in zip(filled, packed, strict=True):
        target[:, : each.shape[1]] = each
    return filled


def _check_lengths(name: str, words: list[str]) -> None:
    longest = max((num_utf8_bytes(name, word) for word in words), default=0)
    if longest > MAX_WORD_BYTES:
        raise InvalidRequestError(
            f"{name} has an entry of {longest} bytes: at most {MAX_WORD_BYTES} are allowed"
        )
