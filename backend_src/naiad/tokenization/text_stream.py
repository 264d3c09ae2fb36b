"""Decides which new tokens of a sequence may be sent, and where a stop string ends the text.

A token is sent as soon as its text is decided. Without stop strings that is at once. With them,
a token is held back while its last characters may be the beginning of a stop string. The stop string
that is completed first ends the text; of several that end at the same character, the longest does (it
begins first). Stop strings are matched in the generated text only, never in the prompt, and
are not part of the text. If the request includes the stop string in the text, the text is cut after
it, and nothing has to be held back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from naiad.sequence import TextContext
from naiad.tokenization.stop_matcher import StopMatcher
from naiad.tokenization.text_decoder import TextDecoder, context_ids
from naiad.tokenization.token_table import TokenTable


@dataclass(slots=True)
class TextChunk:
    """Tokens whose text is decided.

    Consecutive chunks can be merged: `window_ids` comes from the first chunk, `token_ids` are concatenated,
    `num_chars` are summed, and the rest comes from the last chunk.

    Attributes:
        token_ids: ids whose text is now decided, in order; ids held back come in a later chunk.
        window_ids: earlier ids on which the text of `token_ids` depends.
        num_chars: number of characters that `token_ids` add, without those that a stop string cuts off;
            −1 = not counted, because there are no stop strings.
        is_cut: whether a stop string is complete: the sequence then ends with this chunk, whose text ends
            after `num_chars` characters.
        stop_reason: the stop string; None unless `is_cut`.
    """

    token_ids: list[int]
    window_ids: list[int]
    num_chars: int = -1
    is_cut: bool = False
    stop_reason: str | None = None


class TextStream:
    """Holds back the tokens of one sequence until their text is decided. Each push costs O(new tokens)."""

    def __init__(self, table: TokenTable, context: TextContext) -> None:
        """Start after the prompt.

        Args:
            table: the checkpoint's tokens.
            context: `prompt_tail_ids` comes from `Tokenizer.prompt_tail`; stop strings are
                not empty.
        """
        self._table = table
        self._skip_special_tokens = context.skip_special_tokens
        self._includes_stop_string = context.includes_stop_string
        self._window_ids = context_ids(table, context.prompt_tail_ids, context.skip_special_tokens)
        self._is_done = False
        self._matcher: StopMatcher | None = None
        if context.stop_strings:
            self._matcher = StopMatcher(context.stop_strings)
            self._decoder = TextDecoder(table, context.skip_special_tokens)
            self._decoder.push_all(context.prompt_tail_ids)
            self._held: deque[tuple[int, int]] = deque()  # (id, its last character's end)
            self._num_chars = 0  # generated characters so far
            self._num_sent_chars = 0

    def push(self, token_ids: list[int], is_last: bool) -> TextChunk:
        """Take new tokens and return those whose text is now decided.

        When a stop string is complete, the tokens after the one that completed it are dropped.
        Nothing may be pushed after that, nor after `is_last`.

        Args:
            token_ids: the sequence's next ids; may be empty.
            is_last: no more tokens will come, so nothing is held back.
        """
        assert not self._is_done, "the stream has ended"
        self._is_done = is_last
        if self._matcher is None:
            return self._send(token_ids)
        for token_id in token_ids:
            stop_string = self._take(self._matcher, token_id, self._decoder.push(token_id))
            if stop_string is not None:
                return self._cut(stop_string)
        if is_last:
            stop_string = self._take_end(self._matcher, self._decoder.flush())
            if stop_string is not None:
                return self._cut(stop_string)
        if is_last or self._includes_stop_string:
            return self._send_decided(self._num_chars)
        return self._send_decided(self._num_chars - self._matcher.num_open_chars)

    def _take(self, matcher: StopMatcher, token_id: int, text: str) -> str | None:
        """Hold the token; return the stop string that its text completes."""
        num_read, stop_string = matcher.feed(text)
        self._num_chars += num_read
        self._held.append((token_id, self._num_chars))
        return stop_string

    def _take_end(self, matcher: StopMatcher, text: str) -> str | None:
        """Take the text that the decoder held back; it belongs to the last token."""
        num_read, stop_string = matcher.feed(text)
        self._num_chars += num_read
        return stop_string

    def _send_decided(self, num_decided_chars: int) -> TextChunk:
        """Send the held tokens that end within the decided characters."""
        token_ids = []
        num_chars_before = self._num_sent_chars
        while self._held and self._held[0][1] <= num_decided_chars:
            token_id, self._num_sent_chars = self._held.popleft()
            token_ids.append(token_id)
        if self._is_done:
            self._num_sent_chars = num_decided_chars
        chunk = self._send(token_ids)
        chunk.num_chars = self._num_sent_chars - num_chars_before
        return chunk

    def _cut(self, stop_string: str) -> TextChunk:
        """End the text before (or after) the stop string that ends at the last character read."""
        self._is_done = True
        num_chars_before = self._num_sent_chars
        chunk = self._send([token_id for token_id, _ in self._held])
        self._held.clear()
        num_cut_chars = 0 if self._includes_stop_string else len(stop_string)
        chunk.num_chars = self._num_chars - num_cut_chars - num_chars_before
        chunk.is_cut = True
        chunk.stop_reason = stop_string
        return chunk

    def _send(self, token_ids: list[int]) -> TextChunk:
        chunk = TextChunk(token_ids=token_ids, window_ids=self._window_ids)
        if token_ids:
            self._window_ids = context_ids(
                self._table, self._window_ids + token_ids, self._skip_special_tokens
            )
        return chunk
