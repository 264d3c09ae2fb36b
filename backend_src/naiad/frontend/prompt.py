"""A row's prompt and its lists of words, as text and as token ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from naiad.errors import InvalidRequestError
from naiad.frontend.field import Field, FieldError, shown
from naiad.frontend.fields import FIELD
from naiad.frontend.limits import MAX_PROMPT_BYTES_PER_TOKEN
from naiad.sequence import TextContext
from naiad.tokenization import PLAIN_CHAT, ChatOptions, Tokenizer

_BAD_WORDS = FIELD["bad_words"]
_BIASED_WORDS, _WEIGHTS = FIELD["embedding_bias_words"], FIELD["embedding_bias_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompt:
    """The text of one row, checked.

    Attributes:
        text: the prompt; None if there are `messages` or `token_ids`.
        messages: a chat as JSON; None if there is a `text` or `token_ids`.
        token_ids: the prompt's ids, if the client has tokenized it.
        chat: how `messages` are rendered.
        add_special_tokens, skip_special_tokens: override the encoder's settings; None = do not. To a chat
            special tokens are added only if this says so: its template has its own.
        stop_words, bad_words: words that are not empty.
        biased_words: (word, bias) pairs; the bias is added to the logits of the word's tokens.
    """

    text: str | None
    messages: str | None
    token_ids: Sequence[int] | None = None
    chat: ChatOptions = PLAIN_CHAT
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    stop_words: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    biased_words: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """The prompt and the words of one row as token ids.

    Attributes:
        token_ids: the prompt.
        text: the text context if a detokenizer follows; stop strings are then matched on text.
        stop_sequences: id sequences that end the row if no detokenizer follows.
        bad_words: id sequences that are never completed.
        biases: (id, bias) pairs; an id may occur several times.
    """

    token_ids: list[int]
    text: TextContext | None = None
    stop_sequences: Sequence[tuple[int, ...]] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    biases: Sequence[tuple[int, float]] = ()


def check_words(field: Field, words: Sequence[str]) -> list[str]:
    """Check the words of a list; return them without the padding "".

    Raises:
        FieldError: there are too many words, or one is too long or not valid Unicode.
    """
    kept = [word for word in words if word]
    field.check_count(len(kept), "entries")
    for word in kept:
        field.check_text(word)
    return kept


class PromptEncoder:
    """Checks the text of a row and turns it into token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        *,
        add_special_tokens: bool = True,
        skip_special_tokens: bool = True,
    ) -> None:
        """Set up.

        Args:
            tokenizer: the checkpoint's tokenizer.
            max_model_len: limits the bytes of a prompt.
            vocab_size: vocabulary size of the model, which may be larger than the tokenizer's.
            add_special_tokens: whether to add special tokens to a prompt that is text.
            skip_special_tokens: whether special tokens produce no text.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_prompt_bytes = MAX_PROMPT_BYTES_PER_TOKEN * max_model_len
        self._add_special_tokens = add_special_tokens
        self._skip_special_tokens = skip_special_tokens

    def check(self, sent: Mapping[str, Any]) -> WrittenPrompt:
        """Check the fields of one row that hold text.

        Args:
            sent: the row's fields as they were sent: strings, and lists of strings or of numbers. `input_ids`
                stand in for text.

        Raises:
            InvalidRequestError: a field is invalid; the message names it.
        """
        text, messages, token_ids = sent.get("text_input"), sent.get("messages"), sent.get("input_ids")
        if token_ids is None and (text is None) == (messages is None):
            both = "both" if text is not None else "neither"
            raise InvalidRequestError(f"expected either text_input or messages: {both} was sent")
        num_bytes = _num_prompt_bytes(text or messages or "")
        if num_bytes > self._max_prompt_bytes:
            raise InvalidRequestError(
                f"the prompt has {num_bytes} bytes: at most {self._max_prompt_bytes} are allowed"
            )
        if text == "":
            raise FieldError("text_input", " is empty: expected at least one character")
        return WrittenPrompt(
            text=text,
            messages=messages,
            token_ids=token_ids,
            stop_words=check_words(FIELD["stop_words"], sent.get("stop_words", ())),
            bad_words=check_words(FIELD["bad_words"], sent.get("bad_words", ())),
            biased_words=_biased_words(sent),
        )

    def encode(self, written: WrittenPrompt) -> EncodedPrompt:
        """Encode the prompt and the words, and make the text context that later steps need.

        Raises:
            InvalidRequestError: the messages are malformed, or a word makes no tokens or one that the model
                does not have.
        """
        ids = self.token_ids(written)
        skips = written.skip_special_tokens
        skips = self._skip_special_tokens if skips is None else skips
        context = TextContext(
            stop_strings=tuple(written.stop_words),
            skip_special_tokens=skips,
            prompt_tail_ids=tuple(self.tokenizer.prompt_tail(ids, skips)),
            num_prompt_chars=self.tokenizer.num_prompt_chars(ids, skips),
        )
        bad_words = self._banned(written.bad_words)
        biases = self._biases(written.biased_words)
        return EncodedPrompt(token_ids=ids, text=context, bad_words=bad_words, biases=biases)

    def token_ids(self, written: WrittenPrompt) -> list[int]:
        """Return the ids of the prompt alone; `encode` says which errors there are."""
        if written.token_ids is not None:
            return list(written.token_ids)
        adds = written.add_special_tokens
        if written.text is None:
            return self.tokenizer.render_chat(
                written.messages or "", written.chat, add_special_tokens=bool(adds)
            )
        return self.tokenizer.encode(written.text, self._add_special_tokens if adds is None else adds)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word."""
        return [self.tokenizer.encode(word, add_special_tokens=False) for word in words]

    def known_id(self, token_id: int | None) -> int:
        """Return the id, or −1 if it is None or not in the model's vocabulary, as in some checkpoints."""
        return token_id if token_id is not None and token_id < self.vocab_size else -1

    def _banned(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the id sequences to ban for these words."""
        banned: list[tuple[int, ...]] = []
        for word in words:
            for token_ids in self.tokenizer.encode_bad_word(word):
                _check_makes_tokens(_BAD_WORDS, word, token_ids)
                _BAD_WORDS.check_token_ids(token_ids, self.vocab_size)
                banned.append(tuple(token_ids))
        return banned

    def _biases(self, words: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
        """Give each id of a word the word's weight; the weights of the same id are added up in float32."""
        sums: defaultdict[int, np.float32] = defaultdict(lambda: np.float32(0))
        for word, weight in words:
            token_ids = self.tokenizer.encode(word, add_special_tokens=False)
            _check_makes_tokens(_BIASED_WORDS, word, token_ids)
            for token_id in token_ids:
                if token_id >= self.vocab_size:
                    problem = f" makes the token {token_id}: expected ids in [0, {self.vocab_size})"
                    raise _BIASED_WORDS.error(problem)
                sums[token_id] += np.float32(weight)
        if len(sums) > _BIASED_WORDS.max_items:
            problem = f" makes {len(sums)} tokens: at most {_BIASED_WORDS.max_items} are allowed"
            raise _BIASED_WORDS.error(problem)
        biases = [(token_id, float(value)) for token_id, value in sorted(sums.items()) if value]
        for _, value in biases:
            if not _WEIGHTS.minimum <= value <= _WEIGHTS.maximum:
                expected = f"expected finite numbers in [{_WEIGHTS.minimum}, {_WEIGHTS.maximum}]"
                raise _WEIGHTS.error(f", added up for each token, holds {value}: {expected}")
        return biases


def _check_makes_tokens(field: Field, word: str, token_ids: Sequence[int]) -> None:
    """Refuse a word of which the tokenizer leaves nothing, as some do with what their vocabulary lacks."""
    if not token_ids:
        raise field.error(f" has the word {shown(word)}, which makes no tokens: expected at least one")


def _num_prompt_bytes(prompt: str) -> int:
    try:
        return len(prompt.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("the prompt holds half a surrogate pair: expected valid Unicode") from None


def _biased_words(sent: Mapping[str, Any]) -> list[tuple[str, float]]:
    words, weights = sent.get("embedding_bias_words", ()), sent.get("embedding_bias_weights", ())
    if len(words) != len(weights):
        raise _BIASED_WORDS.error(
            f" has {len(words)} words and embedding_bias_weights {len(weights)} weights: "
            "expected as many of each"
        )
    _BIASED_WORDS.check_count(len(words), "entries")
    _WEIGHTS.check_numbers(weights)
    check_words(_BIASED_WORDS, words)
    return [(word, weight) for word, weight in zip(words, weights, strict=True) if word]
