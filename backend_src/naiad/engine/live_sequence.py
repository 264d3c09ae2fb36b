"""A sequence that has not ended, with the part of its output that may not be sent yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from naiad.outputs import ModelOutput, RequestOutput, StepRow, TokenLogProbs, timings_of
from naiad.sequence import Sequence
from naiad.tokenization.text_stream import TextChunk


class TextState(Protocol):
    """Holds tokens back until their text is decided, such as `TextStream`."""

    def push(self, token_ids: list[int], is_last: bool) -> TextChunk:
        """Take new tokens and return those that may be sent; see `TextStream.push`."""


@dataclass(slots=True)
class LiveSequence:
    """A sequence, its text state, and the requested details of each token, such as log-probabilities.

    Attributes:
        num_sent_tokens: number of output tokens that have been returned in outputs.
    """

    sequence: Sequence
    text: TextState | None
    num_sent_tokens: int = 0
    _log_probs: list[TokenLogProbs] = field(default_factory=list)
    _generation_logits: list[bytes] = field(default_factory=list)
    _context_logits: list[bytes] = field(default_factory=list)
    _context_end: int = 0
    _prompt_log_probs: list[TokenLogProbs] = field(default_factory=list)
    _end_log_probs: TokenLogProbs | None = None
    _cum_log_prob: float = 0.0
    _has_output: bool = False
    _has_sent_prompt: bool = False

    def take_prompt_details(self, row: StepRow, result: ModelOutput) -> None:
        """Store what was requested of the prompt positions that a row has computed."""
        sequence_id = self.sequence.sequence_id
        logits = result.context_logits.get(sequence_id)
        if logits is not None and not self._has_output:
            if row.start == 0:
                # After a preemption the prompt is computed again from its start.
                self._context_logits.clear()
            self._context_logits.append(logits)
            self._context_end = row.known_end
        log_probs = result.prompt_log_probs.get(sequence_id)
        if log_probs is not None and not self._has_sent_prompt:
            # The row's first token comes before the prompt token of this index.
            self._prompt_log_probs[row.start :] = log_probs

    def take_token_details(self, result: ModelOutput, num_tokens: int, has_end: bool) -> None:
        """Store the requested details of the step's first `num_tokens` tokens, which are output.

        Args:
            result: the step's result.
            num_tokens: number of its tokens that are output.
            has_end: the token after them ends the sequence.
        """
        sequence_id = self.sequence.sequence_id
        if sequence_id in result.log_probs:
            log_probs = result.log_probs[sequence_id]
            self._log_probs += log_probs[:num_tokens]
            self._end_log_probs = log_probs[num_tokens] if has_end else None
        if sequence_id in result.generation_logits:
            self._generation_logits += result.generation_logits[sequence_id][:num_tokens]

    def output(self, token_ids: list[int], is_last: bool) -> RequestOutput:
        """Return the output that may be sent of these new tokens and of those held back; it may be empty."""
        sequence_id, num_cached = self.sequence.sequence_id, self.sequence.num_cached_tokens
        if self.text is None:
            output = RequestOutput(sequence_id, token_ids, num_cached_tokens=num_cached)
        else:
            chunk = self.text.push(token_ids, is_last)
            output = RequestOutput(
                sequence_id,
                chunk.token_ids,
                window_ids=chunk.window_ids,
                num_chars=chunk.num_chars,
                is_cut=chunk.is_cut,
                stop_reason=chunk.stop_reason or "",
                num_cached_tokens=num_cached,
            )
        self.num_sent_tokens += len(output.token_ids)
        if output.token_ids or is_last:
            self._add_details(output)
        # These do not wait for tokens that are held back: the outputs of siblings may need them.
        if self._prompt_log_probs and len(self._prompt_log_probs) == self.sequence.num_prompt_tokens - 1:
            output.prompt_log_probs, self._prompt_log_probs = self._prompt_log_probs, []
            self._has_sent_prompt = True
        if is_last and not output.is_cut:
            output.end_log_probs = self._end_log_probs
        if is_last or output.is_cut or self.sequence.params.returns_perf_metrics:
            output.num_draft_tokens = self.sequence.num_draft_tokens
            output.num_accepted_tokens = self.sequence.num_accepted_tokens
            output.timings = timings_of(self.sequence)
            output.num_blocks = len(self.sequence.block_table)
            output.num_reused_blocks = self.sequence.num_reused_blocks
        return output

    def _add_details(self, output: RequestOutput) -> None:
        num_tokens = len(output.token_ids)
        if self._log_probs:
            output.log_probs = self._log_probs[:num_tokens]
            del self._log_probs[:num_tokens]
            self._cum_log_prob += sum(details.log_prob for details in output.log_probs)
        output.cum_log_prob = self._cum_log_prob
        if self._generation_logits:
            output.generation_logits = self._generation_logits[:num_tokens]
            del self._generation_logits[:num_tokens]
        if not self._has_output:
            # A sequence that ends early has those of a part of the prompt, which no client could place.
            if self._context_end >= self.sequence.num_prompt_tokens:
                output.context_logits = b"".join(self._context_logits)
            self._context_logits.clear()
            self._has_output = True
