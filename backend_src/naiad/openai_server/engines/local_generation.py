"""A generation whose outputs a thread takes from the engine's socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from naiad.errors import CancelledError, NaiadError, error_with_status
from naiad.frontend.chunks import Chunk, ChunkTexts
from naiad.frontend.request import GenerateRequest
from naiad.openai_server.api.constraints.grammar_errors import about_field
from naiad.openai_server.api.parsing.output_parser import OutputParser
from naiad.openai_server.api.parsing.pieces import ParsedDelta, Piece
from naiad.openai_server.api.tally import SequenceDelta
from naiad.openai_server.engines.generation import Generation
from naiad.outputs import RequestOutput
from naiad.sequence import FinishReason
from naiad.tracing.request_trace import RequestTrace


class LocalGeneration(Generation):
    """The engine's thread calls `take` and `fail`."""

    def __init__(
        self,
        request: GenerateRequest,
        first_id: int,
        texts: ChunkTexts,
        abort: Callable[[LocalGeneration, list[int]], None],
        parsers: Sequence[OutputParser] = (),
        trace: RequestTrace | None = None,
    ) -> None:
        """Set up.

        Args:
            request: the request.
            first_id: the id of its first sequence; the others have the ids that follow.
            texts: makes text of tokens.
            abort: ends sequences; called in the event loop when the client is gone.
            parsers: one for each sequence; empty: outputs are not taken apart.
            trace: follows the request.
        """
        super().__init__(request.num_sequences, trace)
        self.request = request
        self.first_id = first_id
        self._texts = texts
        self._abort = abort
        self._parsers = parsers

    @property
    def sequence_ids(self) -> range:
        """The ids of all sequences."""
        return range(self.first_id, self.first_id + self.request.num_sequences)

    def take(self, output: RequestOutput) -> None:
        """Take an output of the engine."""
        index = output.sequence_id - self.first_id
        width = self.request.outputs.num_sequences
        if self.trace is not None:
            self.trace.take(index // width, output)
        text, parsed = "", None
        if (output.error_status is None and output.token_ids) or output.finish_reason is not None:
            chunk = Chunk(self.request, index // width, index % width, output.sequence_id, (output,))
            (text,) = self._texts.of(chunk)
            parsed = self._parsed(index, chunk)
        with self._lock:
            if output.finish_reason is not None:
                self._open.discard(index)
            error = self._error_of(output)
            if error is not None:
                self._fail(error)
            elif not output.only_started:
                self._arrived.append(SequenceDelta(index, text, output, parsed))
            self._has_begun |= output.error_status is None

    def close(self) -> None:
        """See `Generation`."""
        with self._lock:
            live = sorted(self.first_id + index for index in self._open)
        self._abort(self, live)

    def _parsed(self, index: int, chunk: Chunk) -> ParsedDelta | None:
        """Take the text of a sequence apart; None if all of it is content."""
        if not self._parsers or self._parsers[index].has_only_content_left:
            return None
        output, pieces = chunk.first, self._texts.pieces(chunk)
        made = [
            Piece(text, token_id, log_probs)
            for text, token_id, log_probs in zip_longest(pieces, output.token_ids, output.log_probs)
        ]
        return self._parsers[index].parse_delta(made, finished=chunk.is_last)

    def _error_of(self, output: RequestOutput) -> NaiadError | None:
        """The error that an output ends the whole request with; None if it is none."""
        match output.finish_reason:
            case FinishReason.ERROR:
                error = error_with_status(output.error_status or "INTERNAL", output.error_message)
                # It is equal for all prompts.
                return about_field(error, self.request.rows[0].params.grammar)
            case FinishReason.CANCELLED:
                return CancelledError("the request was cancelled")
            case FinishReason.TIMEOUT if output.error_status is not None and not self._has_begun:
                # The deadline passed in the queue.
                return error_with_status(output.error_status, output.error_message)
        return None
