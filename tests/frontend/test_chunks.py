"""What a response says, before any frontend writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from naiad.frontend.chunks import Chunk, ChunkTexts, PerfMetrics
from naiad.frontend.request import GenerateRequest, RequestedOutputs, RequestRow
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import FinishReason, SamplingParams, TextContext
from naiad.tokenization import TokenTable

NOTHING = RequestedOutputs(
    finish_reason=False,
    num_input_tokens=False,
    num_output_tokens=False,
    num_cached_tokens=False,
    log_probs=False,
    num_log_probs=0,
    context_logits=False,
    generation_logits=False,
    perf_metrics=False,
    num_return_sequences=1,
)
# The prompt is "A b".
ROW = RequestRow(
    prompt_token_ids=[0, 1],
    params=SamplingParams(max_tokens=4),
    text=TextContext(prompt_tail_ids=(1,), num_prompt_chars=3),
    cache_salt="",
)


@pytest.fixture(scope="module")
def texts() -> ChunkTexts:
    """Ids 0 … 5: "A", " b", a special token, the two bytes of "é", and " end"."""
    table = TokenTable([b"A", b" b", b"<s>", b"\xc3", b"\xa9", b" end"], {}, frozenset({2}))
    return ChunkTexts(table)


def chunk(*outputs: RequestOutput, streams: bool = False, echoes: bool = False) -> Chunk:
    request = GenerateRequest(
        request_id="",
        rows=[ROW],
        timeout_s=None,
        streaming=streams,
        exclude_input=not echoes,
        outputs=NOTHING,
    )
    return Chunk(request, 0, 0, outputs[0].sequence_id, outputs)


def output(*ids: int, finish: FinishReason | None = FinishReason.LENGTH, **more: Any) -> RequestOutput:
    return RequestOutput(1, list(ids), **{"window_ids": [1], "finish_reason": finish} | more)


def test_new_tokens_become_text(texts: ChunkTexts) -> None:
    assert texts.of(chunk(output(3, 4, 2, 5))) == ["é end"]


def test_a_character_that_is_not_whole_waits(texts: ChunkTexts) -> None:
    assert texts.of(chunk(output(5, 3, finish=None), streams=True)) == [" end"]
    assert texts.of(chunk(output(4, finish=None, window_ids=[3]), streams=True)) == ["é"]
    assert texts.of(chunk(output(3))) == ["\ufffd"]


def test_an_echoed_prompt_comes_first(texts: ChunkTexts) -> None:
    assert texts.of(chunk(output(5), echoes=True)) == ["A b end"]
    assert texts.of(chunk(output(5), streams=True, echoes=True)) == [" end"]


def test_a_stop_string_cuts_the_new_text_alone(texts: ChunkTexts) -> None:
    cut = output(1, 5, is_cut=True, num_chars=3)
    assert texts.of(chunk(cut)) == [" b "]
    assert texts.of(chunk(cut, echoes=True)) == ["A b b "]


def test_each_sequence_has_a_text_of_its_own(texts: ChunkTexts) -> None:
    assert texts.of(chunk(output(1), output(5), output())) == [" b", " end", ""]


@pytest.mark.parametrize(
    ("made", "pieces"),
    [
        (output(3, 4, 2, 5), ["", "é", "", " end"]),
        (output(5, 3, finish=None), [" end", ""]),
        (output(4, finish=None, window_ids=[3]), ["é"]),
        (output(5, 3), [" end", "\ufffd"]),
        (output(window_ids=[3]), ["\ufffd"]),
        (output(), [""]),
        (output(1, 5, 5, is_cut=True, num_chars=3), [" b", " ", ""]),
    ],
)
def test_the_text_of_each_token(texts: ChunkTexts, made: RequestOutput, pieces: list[str]) -> None:
    assert texts.pieces(chunk(made, streams=True)) == pieces
    assert ["".join(pieces)] == texts.of(chunk(made, streams=True))


def test_the_first_sequence_speaks_for_all_but_their_tokens() -> None:
    both = chunk(output(1, finish=FinishReason.STOP), output(5, 5))
    assert (both.finish_reason, both.is_last, both.num_new_tokens) == (FinishReason.STOP, True, 3)
    assert not both.is_beam_search
    searching = replace(both.request, outputs=replace(NOTHING, beam_width=2))
    assert replace(both, request=searching).is_beam_search


def test_perf_metrics_are_whole_numbers() -> None:
    said = output(
        timings=Timings(1.5, 2.0, 2.25),
        num_blocks=5,
        num_reused_blocks=2,
        num_draft_tokens=8,
        num_accepted_tokens=2,
    )
    assert chunk(said).perf_metrics == PerfMetrics(1_500_000_000, 2_000_000_000, 2_250_000_000, 0, 3, 2, 8, 2)
    assert chunk(said).perf_metrics.acceptance_rate == 0.25
    assert PerfMetrics.of(output()).acceptance_rate == 0
