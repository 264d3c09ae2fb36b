"""The detokenizer's writer: turns `llm`'s tensors of one chunk into text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidRequestError
from naiad.frontend.output_tensors import RESPONSE_TENSORS, Path
from naiad.tokenization import TokenTable, decode, decode_chunk
from naiad.triton_server.requests.tensors import Array
from naiad.triton_server.responses.short_chunk import TEXT_CHUNK, ShortChunk

_CONSUMED = frozenset(each.detokenizer_name for each in RESPONSE_TENSORS if each.path is Path.TO_DETOKENIZER)


def read_short_chunk(tensors: Mapping[str, Array]) -> ShortChunk | None:
    """Return the chunk that comes as one tensor; None: it comes in others.

    Raises:
        InvalidRequestError: the tensor is none, or it comes with tensors that it stands for.
    """
    if TEXT_CHUNK not in tensors:
        return None
    others = sorted(_CONSUMED.intersection(tensors) - {TEXT_CHUNK})
    if others:
        raise InvalidRequestError(f"{TEXT_CHUNK} does not go with {others[0]}: expected one of them")
    return ShortChunk.read(tensors[TEXT_CHUNK])


def chunk_outputs(
    table: TokenTable, tensors: Mapping[str, Array], chunk: ShortChunk | None, skip_special_tokens: bool
) -> dict[str, npt.NDArray[Any]] | None:
    """Return the outputs of the `detokenizer` model for these inputs.

    Args:
        table: the checkpoint's tokens.
        tensors: the inputs. Without a chunk and without `window_ids` each row of TOKENS_BATCH is a text of
            its own. With `window_ids` these may be left out: `num_emitted_tokens`, if the text of the window
            before the tokens of TOKENS_BATCH has been sent; `max_chars`, if the text is not cut; `is_last`,
            if more follows.
        chunk: the result of `read_short_chunk` for these inputs.
        skip_special_tokens: whether special tokens produce no text.

    Returns:
        OUTPUT, the strings without a batch dimension, as clients of TensorRT-LLM's backend read it (`[0]`
        is the text), and the inputs that are passed on; None for a probe.

    Raises:
        InvalidRequestError: the tensors do not fit together, or an id is negative.
    """
    if chunk is not None:
        if chunk.is_probe:
            return None
        texts = [decode_chunk(table, chunk.ids, chunk.num_before, -1, False, skip_special_tokens)]
    elif "window_ids" not in tensors:
        rows = split_beams(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"])
        texts = [decode(table, row, skip_special_tokens) for row in rows]
    elif is_probe(tensors):
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


def is_probe(tensors: Mapping[str, Array]) -> bool:
    """Whether the chunk brings nothing and only asks whether the client is still there."""
    return "window_ids" in tensors and tensors["window_ids"].size == 0 and not _value(tensors, "is_last", 0)


def _value(tensors: Mapping[str, Array], name: str, default: int) -> int:
    return int(tensors[name].item()) if name in tensors else default


def split_beams(ids: Array, lengths: Array) -> list[list[int]]:
    """Return the ids of each beam of each row; −1 is padding.

    Args:
        ids: [B, k, n] int32.
        lengths: [B, k] int32.

    Raises:
        InvalidRequestError: the number of lengths differs from the number of beams.
    """
    rows = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    if lengths.size != len(rows):
        raise InvalidRequestError(
            f"SEQUENCE_LENGTH has {lengths.size} values for {len(rows)} rows of TOKENS_BATCH"
        )
    return [
        [each for each in row[: max(length, 0)].tolist() if each != -1]
        for row, length in zip(rows, lengths.reshape(-1).tolist(), strict=True)
    ]


def decode_beams(table: TokenTable, tensors: Mapping[str, Array], skip_special_tokens: bool) -> list[str]:
    """Return the whole text of each of a row's beams; all follow the same window, and each has its own cut.

    Args:
        table: the checkpoint's tokens.
        tensors: TOKENS_BATCH, SEQUENCE_LENGTH, window_ids and beam_max_chars of one row.
        skip_special_tokens: special tokens make no text.

    Raises:
        InvalidRequestError: the tensors do not fit together, or an id is negative.
    """
    beams = split_beams(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"])
    cuts = tensors["beam_max_chars"].reshape(-1).tolist()
    if len(cuts) != len(beams):
        raise InvalidRequestError(
            f"beam_max_chars has {len(cuts)} values for {len(beams)} rows of TOKENS_BATCH"
        )
    window = tensors["window_ids"].reshape(-1).tolist()
    return [
        decode_chunk(
            table,
            window + beam,
            len(window),
            max_chars=cut,
            is_last=True,
            skip_special_tokens=skip_special_tokens,
        )
        for beam, cut in zip(beams, cuts, strict=True)
    ]
