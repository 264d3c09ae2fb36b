"""`text_context`: written by the tokenizer model, but any client of `llm` may send one."""

from __future__ import annotations

import msgspec

from naiad.errors import InvalidRequestError
from naiad.sequence import TextContext
from naiad.triton_server.request_fields import Array
from naiad.triton_server.request_limits import MAX_STOP_WORDS, MAX_WORD_BYTES

# More than the text behind a prompt ever depends on.
MAX_PROMPT_TAIL_IDS = 16
MAX_PROMPT_CHARS = 1 << 30

_decoder = msgspec.json.Decoder(TextContext)


def read_text_context(tensor: Array | None, vocab_size: int) -> TextContext | None:
    """The row's text context, checked like everything a client sends; None: no detokenizer follows.

    Raises:
        InvalidRequestError: names the field of the context, its value and what is allowed.
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


def _check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    if len(stop_strings) > MAX_STOP_WORDS:
        raise InvalidRequestError(
            f"text_context: stop_strings has {len(stop_strings)} entries: "
            f"at most {MAX_STOP_WORDS} are allowed"
        )
    for string in stop_strings:
        # A lone surrogate can be written in JSON, but it is no text.
        num_bytes = len(string.encode("utf-8", "surrogatepass"))
        if not 1 <= num_bytes <= MAX_WORD_BYTES:
            raise InvalidRequestError(
                f"text_context: stop_strings has an entry of {num_bytes} bytes: expected 1 … {MAX_WORD_BYTES}"
            )
