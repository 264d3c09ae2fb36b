"""Reads `llm`'s input tensors into the typed request, or refuses them with one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from naiad.errors import InvalidRequestError
from naiad.frontend.field import Field, FieldError, Frontend, shown
from naiad.frontend.fields import FIELD, known_parameters
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import EncodedPrompt
from naiad.frontend.request import GenerateRequest, StopRequest, build_request, required, stop_request
from naiad.sequence import TextContext
from naiad.tokenization import unpack_word_list
from naiad.triton_server.requests.tensors import (
    Array,
    RequestSource,
    asks_to_stop,
    refuse_unknown_parameters,
    refuse_unserved,
    sent_rows,
    timeout_us,
)

# More prompt tokens than the text after a prompt can ever depend on.
MAX_PROMPT_TAIL_IDS = 16
MAX_PROMPT_CHARS = 1 << 30

_STOP_STRINGS = FIELD["stop_words"]
# Tensors that are read by `_prompt` instead of as fields.
_OF_THE_PROMPT = (
    "input_ids",
    "input_lengths",
    "text_context",
    "stop_words_list",
    "bad_words_list",
    "embedding_bias",
)
# What a client without a text context sends instead of a part of the request that is text.
_IDS_OF = {"prompt": "input_ids", "text": "stop_words_list", "params.bad_words": "bad_words_list"}
_TEXTS = {
    name: field
    for name, field in known_parameters(Frontend.LLM).items()
    if field.sets in _IDS_OF and not field.name_at(Frontend.LLM)
}
_decoder = msgspec.json.Decoder(TextContext)


def read_request(source: RequestSource, limits: ModelLimits) -> GenerateRequest | StopRequest:
    """Check the whole request and build its rows.

    Raises:
        InvalidRequestError: a row is invalid; it refuses the whole request. The message has the client's name
            of the field: that of the ensemble if there is a text context, else that of the tensor.
    """
    tensors, parameters = source.tensors(), source.parameters()
    try:
        return _read(tensors, parameters, source, limits)
    except FieldError as error:
        field = FIELD.get(error.field_name)
        if field is None or "text_context" in tensors or field.name in parameters:
            raise
        raise error.named(field.name_at(Frontend.LLM) or field.name) from None


def _read(
    tensors: Mapping[str, Array], parameters: Mapping[str, Any], source: RequestSource, limits: ModelLimits
) -> GenerateRequest | StopRequest:
    refuse_unknown_parameters(parameters, Frontend.LLM, limits.forwarded_headers)
    refuse_unserved(tensors)
    refuse_unserved(parameters)
    if asks_to_stop(tensors, parameters):
        return stop_request(source.request_id)
    if "text_context" not in tensors:
        _refuse_texts(parameters)
    num_rows = required(tensors, "input_lengths").shape[0]
    sent = sent_rows(tensors, parameters, Frontend.LLM, num_rows, apart=_OF_THE_PROMPT)
    of_prompts = [(name, tensors[name]) for name in _OF_THE_PROMPT if name in tensors]
    prompts = [
        _prompt({name: tensor[row : row + 1] for name, tensor in of_prompts}, limits)
        for row in range(num_rows)
    ]
    return build_request(
        sent, prompts, limits, request_id=source.request_id, timeout_us=timeout_us(source, parameters)
    )


def _refuse_texts(parameters: Mapping[str, Any]) -> None:
    """Refuse text, which only a tokenizer model before this one would have read."""
    for name, value in parameters.items():
        field = _TEXTS.get(name)
        if field is not None and not field.asks_for_nothing(value):
            problem = f" = {shown(value)} is text, which `llm` does not tokenize"
            raise field.error(f"{problem}: expected token ids, in {_IDS_OF[field.sets]}")


def _prompt(tensors: Mapping[str, Array], limits: ModelLimits) -> EncodedPrompt:
    """Read one row's prompt, stop words, bad words and biases."""
    ids = required(tensors, "input_ids").reshape(-1)
    length = int(tensors["input_lengths"].item())
    if not 0 <= length <= ids.size:
        raise FieldError("input_lengths", f" = {length}: expected 1 … {ids.size}, the width of input_ids")
    text = _text_context(tensors.get("text_context"), limits.vocab_size)
    bad_words = _words(FIELD["bad_words_list"], tensors.get("bad_words_list"))
    for word in bad_words:
        FIELD["bad_words_list"].check_token_ids(word, limits.vocab_size)
    stop_words = [] if text else _words(FIELD["stop_words_list"], tensors.get("stop_words_list"))
    return EncodedPrompt(
        token_ids=ids[:length].tolist(),
        text=text,
        stop_sequences=stop_words,
        bad_words=bad_words,
        biases=_biases(tensors.get("embedding_bias"), limits.vocab_size),
    )


def _words(field: Field, tensor: Array | None) -> list[tuple[int, ...]]:
    """Unpack the id sequences of a packed word list."""
    if tensor is None:
        return []
    words = unpack_word_list(np.ascontiguousarray(tensor.reshape(2, -1)))
    field.check_count(len(words), "words")
    longest = max(map(len, words), default=0)
    if longest > field.max_item_size:
        raise field.error(f" has a word of {longest} tokens: at most {field.max_item_size} are allowed")
    return [tuple(word) for word in words]


def _biases(tensor: Array | None, vocab_size: int) -> list[tuple[int, float]]:
    """The nonzero entries of a dense [vocab_size] vector, as (id, bias) pairs."""
    field = FIELD["embedding_bias"]
    if tensor is None or tensor.size == 0:
        return []
    values = tensor.reshape(-1)
    if values.size != vocab_size:
        raise field.error(
            f" has {values.size} values: expected 0 or {vocab_size}, the size of the vocabulary"
        )
    # NaN and infinities count as nonzero; they are refused later.
    ids = np.flatnonzero(values)
    numbers = values[ids].tolist()
    field.check_numbers(numbers)
    if ids.size > field.max_items:
        problem = f" has {ids.size} values that are not 0: at most {field.max_items} are allowed"
        raise field.error(problem)
    return list(zip(ids.tolist(), numbers, strict=True))


def _text_context(tensor: Array | None, vocab_size: int) -> TextContext | None:
    """Read the row's text context; None if no detokenizer follows.

    The tokenizer model writes it, but any client of `llm` may send one, so it is checked like other input.
    """
    if tensor is None:
        return None
    try:
        context = _decoder.decode(tensor.item())
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError):
        raise InvalidRequestError("text_context is not what Naiad's tokenizer model writes") from None
    _check_stop_strings(context.stop_strings)
    ids = context.prompt_tail_ids
    if len(ids) > MAX_PROMPT_TAIL_IDS:
        raise InvalidRequestError(
            f"text_context: prompt_tail_ids has {len(ids)} ids: at most {MAX_PROMPT_TAIL_IDS} are allowed"
        )
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"text_context: prompt_tail_ids holds {token_id}: expected token ids in [0, {vocab_size})"
            )
    if not 0 <= context.num_prompt_chars <= MAX_PROMPT_CHARS:
        raise InvalidRequestError(
            f"text_context: num_prompt_chars = {context.num_prompt_chars}: expected 0 … {MAX_PROMPT_CHARS}"
        )
    return context


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    most, max_bytes = _STOP_STRINGS.max_items, _STOP_STRINGS.max_item_size
    if len(stop_strings) > most:
        raise InvalidRequestError(
            f"text_context: stop_strings has {len(stop_strings)} entries: at most {most} are allowed"
        )
    for string in stop_strings:
        # JSON can hold a lone surrogate, which cannot be encoded as UTF-8.
        num_bytes = len(string.encode("utf-8", "surrogatepass"))
        if not 1 <= num_bytes <= max_bytes:
            raise InvalidRequestError(
                f"text_context: stop_strings has an entry of {num_bytes} bytes: expected 1 … {max_bytes}"
            )
