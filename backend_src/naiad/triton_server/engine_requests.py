"""A request as the engine's sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from naiad.sequence import EngineRequest
from naiad.triton_server.beam_response import BeamRow
from naiad.triton_server.joined_row import JoinedRow
from naiad.triton_server.request_reader import GenerateRequest
from naiad.triton_server.response_stream import StreamRow


def new_stream_rows(request: GenerateRequest, draw_first_id: Callable[[int], int]) -> list[StreamRow]:
    """One for each sequence or search, those of a row side by side, their ids rising.

    Args:
        request: says how many.
        draw_first_id: number of the request's sequences → the id of the first; the others follow.
            Nobody can guess an id: who acknowledges a chunk of it speaks for its client.
    """
    num_sequences = request.wishes.num_sequences
    ids = itertools.count(draw_first_id(len(request.rows) * num_sequences))
    if request.wishes.beam_width > 1 or request.joins_sequences:
        row_kind = BeamRow if request.wishes.beam_width > 1 else JoinedRow
        return [
            row_kind(index, next(ids), sibling_ids=tuple(itertools.islice(ids, num_sequences - 1)))
            for index in range(len(request.rows))
        ]
    return [
        StreamRow(index, next(ids), sequence_index)
        for index in range(len(request.rows))
        for sequence_index in range(num_sequences)
    ]


def engine_requests(request: GenerateRequest, rows: list[StreamRow]) -> list[EngineRequest]:
    """One for each row of the request, its further sequences as siblings of the first."""
    num_sequences = request.wishes.num_sequences
    ids = [sequence_id for row in rows for sequence_id in row.sequence_ids]
    return [
        EngineRequest(
            sequence_id=ids[index * num_sequences],
            sibling_ids=tuple(ids[index * num_sequences + 1 : (index + 1) * num_sequences]),
            prompt_token_ids=asked.prompt_token_ids,
            params=asked.params,
            text=asked.text,
            timeout_s=request.timeout_s,
            cache_salt=asked.cache_salt,
            beam=asked.beam,
            draft_token_ids=asked.draft_token_ids,
            retention=asked.retention,
        )
        for index, asked in enumerate(request.rows)
    ]
