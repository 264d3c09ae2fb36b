"""The texts of several token rows in one response."""

from __future__ import annotations

from collections.abc import Mapping

from naiad.errors import InvalidRequestError
from naiad.tokenization import TokenTable, decode_chunk
from naiad.triton_server.request_fields import Array


def split_beams(ids: Array, lengths: Array) -> list[list[int]]:
    """The ids of each beam of each row; −1 is padding.

    Args:
        ids: [B, k, n] int32.
        lengths: [B, k] int32.

    Raises:
        InvalidRequestError: there is not one length for each beam.
    """
    rows = ids.reshape(-1, ids.shape[-1])
    if lengths.size != len(rows):
        raise InvalidRequestError(
            f"SEQUENCE_LENGTH has {lengths.size} values for {len(rows)} rows of TOKENS_BATCH"
        )
    return [
        [each for each in row[: max(length, 0)].tolist() if each != -1]
        for row, length in zip(rows, lengths.reshape(-1).tolist(), strict=True)
    ]


def decode_beams(table: TokenTable, tensors: Mapping[str, Array], skip_special_tokens: bool) -> list[str]:
    """The whole texts of one row's beams, all behind the same window and each with its own cut.

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
