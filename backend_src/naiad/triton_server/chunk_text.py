"""From `llm`'s chunks of token ids to text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.tokenization import TokenTable, decode, decode_chunk
from naiad.triton_server.beam_text import decode_beams, split_beams
from naiad.triton_server.request_fields import Array

_CONSUMED = frozenset(
    {
        "TOKENS_BATCH",
        "SEQUENCE_LENGTH",
        "sequence_id",
        "window_ids",
        "num_emitted_tokens",
        "max_chars",
        "beam_max_chars",
        "is_last",
    }
)


def chunk_outputs(
    table: TokenTable, tensors: Mapping[str, Array], skip_special_tokens: bool
) -> dict[str, npt.NDArray[Any]] | None:
    """The outputs of the `detokenizer` model for its inputs.

    Args:
        table: the checkpoint's tokens.
        tensors: without `window_ids` each row of TOKENS_BATCH is a text of its own. Beside it may be
            left out: `num_emitted_tokens`, if the tokens of the window before those of TOKENS_BATCH are
            text already; `max_chars`, if no text is cut off; `is_last`, if more follows.
        skip_special_tokens: special tokens make no text.

    Returns:
        OUTPUT, one string after the other without a batch dimension, as the reference's clients
        read it (`[0]` is the text); and what is passed on. None for a probe.

    Raises:
        InvalidRequestError: the tensors do not fit together, or an id is negative.
    """
    if "window_ids" not in tensors:
        rows = split_beams(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"])
        texts = [decode(table, row, skip_special_tokens) for row in rows]
    elif tensors["window_ids"].size == 0 and not _value(tensors, "is_last", 0):
        return None
    elif "beam_max_chars" in tensors:
        texts = decode_beams(table, tensors, skip_special_tokens)
    else:
        num_before = tensors["window_ids"].size - tensors["TOKENS_BATCH"].size
        texts = [
            decode_chunk(
                table,
                tensors["window_ids"].reshape(-1).tolist(),
                _value(tensors, "num_emitted_tokens", num_before),
                max_chars=_value(tensors, "max_chars", -1),
                is_last=bool(_value(tensors, "is_last", 0)),
                skip_special_tokens=skip_special_tokens,
            )
        ]
    text = np.array([text.encode() for text in texts], dtype=np.object_)
    passed_on = {name: value for name, value in tensors.items() if name not in _CONSUMED}
    return {"OUTPUT": text} | passed_on


def _value(tensors: Mapping[str, Array], name: str, default: int) -> int:
    return int(tensors[name].item()) if name in tensors else default
