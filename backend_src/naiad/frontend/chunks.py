"""What a response says before a frontend writes it: tokens, text and details, as plain values.

The engine's outputs become a `Chunk`; `ChunkTexts` turns its tokens into text; each frontend has one writer
that makes tensors or JSON of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naiad.frontend.request import GenerateRequest
from naiad.outputs import RequestOutput, Timings
from naiad.sequence import FinishReason
from naiad.tokenization import TokenTable, decode_after


@dataclass(slots=True)
class Chunk:
    """What one response holds: new tokens of a sequence, or of all sequences that answer together.

    Attributes:
        request: that it answers.
        row_index: the row of the request, from 0.
        sequence_index: which of the sequences from the row's prompt, from 0.
        sequence_id: the engine's; of several sequences the first one's.
        outputs: one for each sequence, in order; those of a beam search best first.
    """

    request: GenerateRequest
    row_index: int
    sequence_index: int
    sequence_id: int
    outputs: Sequence[RequestOutput]

    @property
    def first(self) -> RequestOutput:
        """The output that speaks for all where there is one value for them."""
        return self.outputs[0]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The row's prompt."""
        return self.request.rows[self.row_index].prompt_token_ids

    @property
    def is_last(self) -> bool:
        """Whether nothing of these sequences follows."""
        return self.outputs[0].finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None until its last chunk. Of several sequences the first one's."""
        return self.outputs[0].finish_reason

    @property
    def num_new_tokens(self) -> int:
        """New tokens of all its sequences."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def is_beam_search(self) -> bool:
        """Whether the sequences are the results of one search."""
        return self.request.outputs.beam_width > 1

    @property
    def is_echoing(self) -> bool:
        """Whether the prompt stands before the new tokens: never in a stream."""
        return not self.request.streaming and not self.request.exclude_input

    @property
    def num_prompt_chars(self) -> int:
        """Characters of the prompt's text; 0 where nobody makes text of it."""
        text = self.request.rows[self.row_index].text
        return 0 if text is None else text.num_prompt_chars

    @property
    def perf_metrics(self) -> PerfMetrics:
        """Times, blocks and drafts so far. Of several sequences the first one's."""
        return PerfMetrics.of(self.outputs[0])


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """What a sequence has used so far.

    Attributes:
        arrival_time_ns, first_scheduled_time_ns, first_token_time_ns, last_token_time_ns: nanoseconds of the
            machine's monotonic clock; 0 = not yet.
        num_new_blocks, num_reused_blocks: of the KV cache.
        num_draft_tokens, num_accepted_tokens: drafts, and those of them that the model agreed with.
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
        """Read those that the engine sends with an output."""
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
        """Accepted tokens in each draft token; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class ChunkTexts:
    """Turns tokens of chunks into text. It has no state: each output names the ids its text depends on."""

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        """Take the checkpoint's tokens, and whether special ones make no text."""
        self._table = table
        self._skip_special_tokens = skip_special_tokens

    def of(self, chunk: Chunk) -> list[str]:
        """Return the new text of each sequence, after the prompt's where that is echoed."""
        return [self._text(chunk, output) for output in chunk.outputs]

    def _text(self, chunk: Chunk, output: RequestOutput) -> str:
        before, new, num_echoed_chars = output.window_ids, output.token_ids, 0
        if chunk.is_echoing:
            before, new, num_echoed_chars = [], chunk.prompt_token_ids + new, chunk.num_prompt_chars
        text = decode_after(
            self._table,
            before,
            new,
            is_last=output.finish_reason is not None,
            skip_special_tokens=self._skip_special_tokens,
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
        context_logits=first.context_logits or second.context_logits,
        generation_logits=first.generation_logits + second.generation_logits,
        num_draft_tokens=second.num_draft_tokens,
        num_accepted_tokens=second.num_accepted_tokens,
        timings=second.timings,
        num_blocks=second.num_blocks,
        num_reused_blocks=second.num_reused_blocks,
    )
