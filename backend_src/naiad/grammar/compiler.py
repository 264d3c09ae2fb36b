"""`Grammars`: compiles grammars for one checkpoint, and keeps what it has compiled."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

from llguidance import LLTokenizer

from naiad.errors import InvalidRequestError
from naiad.grammar import limits
from naiad.grammar.compiling import compile_translated
from naiad.grammar.helper import Helper
from naiad.grammar.matcher import GrammarMatcher, MaskFiller, readable
from naiad.grammar.vocabulary import Vocabulary
from naiad.sequence import GrammarKind, GrammarSpec

_Key = tuple[GrammarKind, str, str, str]
_MAX_FILL_THREADS = 8
# llguidance shows the place of an error in its own form of a grammar.
_WITH_PLACE = re.compile(r"\A(?:at )?\d+\(\d+\): (.*?)\n *\d+ \| .*", re.DOTALL)


class CompiledGrammar:
    """A grammar, ready for texts.

    Attributes:
        key: equal for grammars of the same source.
        num_source_bytes: size of its source.
        end_token_ids: the ids that end a text.
        has_canonical_tokens: whether forced text has one form in tokens, so that guesses at it are good.
    """

    __slots__ = ("__weakref__", "_start", "end_token_ids", "has_canonical_tokens", "key", "num_source_bytes")

    def __init__(
        self, key: _Key, start: GrammarMatcher, num_source_bytes: int, tokenizer: LLTokenizer
    ) -> None:
        """Keep a matcher at the start of a text, which is cloned for each text."""
        self.key = key
        self._start = start
        self.num_source_bytes = num_source_bytes
        self.end_token_ids = tuple(tokenizer.eos_tokens)
        self.has_canonical_tokens = bool(tokenizer.is_canonical)

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of a text."""
        return self._start.clone()


class Grammars:
    """Compiles grammars with a checkpoint's tokenizer. Any thread may use it.

    The grammars used last are kept, within limits, and so is every grammar that somebody holds. One that is
    forgotten is found by its holders only, until the last of them lets it go.
    """

    def __init__(self, model_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Load nothing yet: the tokenizer is loaded for the first grammar.

        Args:
            model_dir: the checkpoint.
            vocab_size: of the model, which may be larger than the tokenizer's.
            eos_token_ids: the ids that end a text.
        """
        self._vocabulary = Vocabulary(str(model_dir), vocab_size, tuple(eos_token_ids))
        self._small_helper = Helper(self._vocabulary, limits.SMALL_WORK_S)
        self._large_helper = Helper(self._vocabulary, limits.LARGE_WORK_S)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._used: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._num_used_bytes = 0
        self._all: WeakValueDictionary[_Key, CompiledGrammar] = WeakValueDictionary()
        self._forgotten: WeakSet[CompiledGrammar] = WeakSet()

    def __len__(self) -> int:
        """Number of grammars that are kept whether or not a sequence uses them."""
        return len(self._used)

    @property
    def tokenizer(self) -> LLTokenizer:
        """The checkpoint's tokenizer in llguidance's form.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer.json.
        """
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary.load().tokenizer
            return self._tokenizer

    def mask_filler(self) -> MaskFiller:
        """Make a filler of masks that fit the tokenizer."""
        num_threads = min(_MAX_FILL_THREADS, len(os.sched_getaffinity(0)))
        return MaskFiller(self.tokenizer, num_threads)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return a grammar that is compiled and not forgotten; None: there is none."""
        with self._lock:
            return self._all.get(_key(spec))

    def held(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar, even one that is forgotten; compile it only if nobody holds it.

        This is for requests and sequences of the engine, which hold their grammars: it compiles nothing for
        them, so no step waits.

        Raises:
            InvalidRequestError: nobody holds the grammar, and it is refused as in `get`.
        """
        key = _key(spec)
        with self._lock:
            if key not in self._all:
                for each in self._forgotten:
                    if each.key == key:
                        return each
        return self.get(spec)

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar; compile it if it is new, which may take seconds.

        Raises:
            InvalidRequestError: it is too large, or malformed, or has something that is not supported.
        """
        key = _key(spec)
        with self._lock:
            compiled = self._all.get(key)
            if compiled is not None:
                self._keep(key, compiled)
                return compiled
        compiled = self._compile(spec)
        with self._lock:
            compiled = self._all.setdefault(key, compiled)
            self._keep(key, compiled)
        return compiled

    def forget(self, compiled: CompiledGrammar) -> None:
        """Let no further request find this grammar: its lexer may have reached a limit."""
        with self._lock:
            self._forgotten.add(compiled)
            if self._all.get(compiled.key) is compiled:
                del self._all[compiled.key]
                if self._used.pop(compiled.key, None) is not None:
                    self._num_used_bytes -= compiled.num_source_bytes

    def _keep(self, key: _Key, compiled: CompiledGrammar) -> None:
        if key not in self._used:
            self._used[key] = compiled
            self._num_used_bytes += compiled.num_source_bytes
        self._used.move_to_end(key)
        while len(self._used) > 1 and (
            len(self._used) > limits.MAX_KEPT_GRAMMARS or self._num_used_bytes > limits.MAX_KEPT_SOURCE_BYTES
        ):
            _, dropped = self._used.popitem(last=False)
            self._num_used_bytes -= dropped.num_source_bytes

    def close(self) -> None:
        """End the processes that compile."""
        self._small_helper.close()
        self._large_helper.close()

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        num_bytes = _checked_size(spec)
        tokenizer = self.tokenizer
        is_small = num_bytes <= limits.MAX_SMALL_SOURCE_BYTES
        helper = self._small_helper if is_small else self._large_helper
        try:
            start = compile_translated(helper.translate(spec), tokenizer)
        except ValueError as error:
            raise refusal(spec, str(error)) from None
        return CompiledGrammar(_key(spec), start, num_bytes, tokenizer)


def refusal(spec: GrammarSpec, problem: str) -> InvalidRequestError:
    """Make the error for a grammar that is refused, without text that no client has sent."""
    # Rules of EBNF are the client's, or like them; Lark is written for the formats and tools of chats.
    if spec.kind is not GrammarKind.EBNF:
        problem = _WITH_PLACE.sub(r"\1", problem)
    name = spec.field if spec.kind is GrammarKind.LARK else f"{spec.field} ({spec.kind.value})"
    return InvalidRequestError(f"{name} is refused: {readable(problem)}")


def _key(spec: GrammarSpec) -> _Key:
    return spec.kind, spec.source, spec.begins_after, spec.opened_by


def _checked_size(spec: GrammarSpec) -> int:
    num_bytes = len(spec.source.encode())
    if num_bytes > limits.MAX_SOURCE_BYTES:
        raise refusal(spec, f"it has {num_bytes} bytes: at most {limits.MAX_SOURCE_BYTES} are allowed")
    most = limits.MAX_BEGINS_AFTER_BYTES
    for name, marker in (("begins_after", spec.begins_after), ("opened_by", spec.opened_by)):
        num_marker_bytes = len(marker.encode())
        if num_marker_bytes > most:
            raise refusal(spec, f"{name} has {num_marker_bytes} bytes: at most {most} are allowed")
    return num_bytes
