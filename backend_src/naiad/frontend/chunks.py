"""The content of a response before a frontend writes it: tokens, text and details, as plain values.

The engine's outputs become a `Chunk`, `ChunkTexts` turns its tokens into text, and the writer of each
frontend turns both into tensors or JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naiad.frontend.request import GenerateRequest, RequestRow
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import FinishReason
from naiad.tokenization import TextDecoder, TokenTable, decode_after


@dataclass(slots=True)
class Chunk:
    """The content of one response: new tokens of a sequence, or of all sequences that share a response.

    Attributes:
        request: the request.
        row_index: index of the request's row, from 0.
        sequence_index: index among the sequences of the row's prompt, from 0.
        sequence_id: the engine's id of the sequence, or of the first of several.
        outputs: an output for each sequence, in order; for a beam search, best first.
    """

    request: GenerateRequest
    row_index: int
    sequence_index: int
    sequence_id: int
    outputs: Sequence[RequestOutput]

    @property
    def first(self) -> RequestOutput:
        """The first sequence's output, which provides the values that the sequences share."""
        return self.outputs[0]

    @property
    def row(self) -> RequestRow:
        """The request's row."""
        return self.request.rows[self.row_index]

    @property
    def asks_for_drafts(self) -> bool:
        """Whether the row's client offers draft tokens or sets how many there may be, and not to none."""
        return bool(self.row.draft_token_ids) or self.row.params.num_draft_tokens > 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the row's prompt."""
        return self.row.prompt_token_ids

    @property
    def is_last(self) -> bool:
        """Whether these sequences have no further chunks."""
        return self.outputs[0].finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence, or the first of several, ended; None until the last chunk."""
        return self.outputs[0].finish_reason

    @property
    def num_new_tokens(self) -> int:
        """Number of new tokens of all sequences."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def is_beam_search(self) -> bool:
        """Whether the sequences are the results of a beam search."""
        return self.request.outputs.beam_width > 1

    @property
    def is_echoing(self) -> bool:
        """Whether the response begins with the prompt; streamed responses never do."""
        return not self.request.streaming and not self.request.exclude_input

    @property
    def num_prompt_chars(self) -> int:
        """Number of characters of the prompt's text; 0 if tokens are not turned into text."""
        text = self.row.text
        return 0 if text is None else text.num_prompt_chars

    @property
    def perf_metrics(self) -> PerfMetrics:
        """Timings and the numbers of blocks and draft tokens of the sequence, or of the first of several."""
        return PerfMetrics.of(self.outputs[0])


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """Timings and resources of a sequence so far.

    Attributes:
        arrival_time_ns, first_scheduled_time_ns, first_token_time_ns, last_token_time_ns: nanoseconds of the
            machine's monotonic clock; 0 = not yet.
        num_new_blocks, num_reused_blocks: numbers of KV cache blocks.
        num_draft_tokens, num_accepted_tokens: numbers of draft tokens, and of those that were accepted.
    """

    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    num_new_blocks: int
    num_reused_blocks: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> PerfMetrics:
        """Read the metrics that the engine sends with an output."""
        timings = output.timings or Timings()
        return cls(
            arrival_time_ns=_nanoseconds(timings.arrival_s),
            first_scheduled_time_ns=_nanoseconds(timings.first_scheduled_s),
            first_token_time_ns=_nanoseconds(timings.first_token_s),
            last_token_time_ns=_nanoseconds(timings.last_token_s),
            num_new_blocks=max(0, output.num_blocks - output.num_reused_blocks),
            num_reused_blocks=output.num_reused_blocks,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the draft tokens that were accepted; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class ChunkTexts:
    """Turns the tokens of chunks into text. Stateless: each output has the ids that its text depends on."""

    def __init__(self, table: TokenTable) -> None:
        """Use this table of tokens."""
        self._table = table

    def of(self, chunk: Chunk) -> list[str]:
        """Return the new text of each sequence, preceded by the prompt's text if the prompt is echoed.

        The row's text context says whether special tokens produce text.
        """
        return [self._text(chunk, output) for output in chunk.outputs]

    def pieces(self, chunk: Chunk) -> list[str]:
        """Return the characters that each new token of the first sequence completes, without an echo.

        They add up to its text. If there is no new token, what was held back is a piece by itself.
        """
        assert chunk.row.text is not None, "a row whose tokens another model turns into text"
        output, left = chunk.first, chunk.first.num_chars
        decoder = TextDecoder(self._table, chunk.row.text.skip_special_tokens)
        decoder.push_all(output.window_ids)
        pieces = [decoder.push(token_id) for token_id in output.token_ids]
        if chunk.is_last:
            rest = decoder.flush()
            pieces[-1:] = [pieces[-1] + rest] if pieces else [rest]
        if not output.is_cut:
            return pieces
        cut = []
        for piece in pieces:
            cut.append(piece[:left])
            left -= len(cut[-1])
        return cut

    def _text(self, chunk: Chunk, output: RequestOutput) -> str:
        assert chunk.row.text is not None, "a row whose tokens another model turns into text"
        before, new, num_echoed_chars = output.window_ids, output.token_ids, 0
        if chunk.is_echoing:
            before, new, num_echoed_chars = [], chunk.prompt_token_ids + new, chunk.num_prompt_chars
        text = decode_after(
            self._table,
            before,
            new,
            is_last=output.finish_reason is not None,
            skip_special_tokens=chunk.row.text.skip_special_tokens,
        )
        return text[: num_echoed_chars + output.num_chars] if output.is_cut else text


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merge two consecutive outputs of a sequence into one."""
    counted = first.num_chars >= 0 and second.num_chars >= 0
    return RequestOutput(
        sequence_id=first.sequence_id,
        token_ids=first.token_ids + second.token_ids,
        window_ids=first.window_ids if first.token_ids else second.window_ids,
        num_chars=first.num_chars + second.num_chars if counted else -1,
        is_cut=second.is_cut,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        log_probs=first.log_probs + second.log_probs,
        cum_log_prob=second.cum_log_prob,
        end_log_probs=second.end_log_probs,
        prompt_log_probs=first.prompt_log_probs or second.prompt_log_probs,
        context_logits=first.context_logits or second.context_logits,
        generation_logits=first.generation_logits + second.generation_logits,
        num_draft_tokens=second.num_draft_tokens,
        num_accepted_tokens=second.num_accepted_tokens,
        timings=second.timings,
        num_blocks=second.num_blocks,
        num_reused_blocks=second.num_reused_blocks,
    )
