"""A checkpoint's tokenizer in llguidance's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from naiad.errors import InvalidRequestError, ModelError
from naiad.grammar.special_tokens import hide_special_tokens

# Tokens that are text of a JSON string, in groups by their length. If a mask allows a whole group, llguidance
# does not look at each token; with this many groups that holds near the end of a string with `maxLength` too.
_OF_A_STRING = r'[^"\\\x00-\x1F\x7F]'
_GROUPS = [*(f"{_OF_A_STRING}{{1,{length}}}" for length in (3, 6, 9, 12, 15, 30)), f"{_OF_A_STRING}+"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A checkpoint's tokens.

    Attributes:
        tokenizer: in llguidance's form; the text of a special token is ordinary text for it.
        special_ids: text → id of each special token.
    """

    tokenizer: LLTokenizer
    special_ids: Mapping[str, int]

    def special_id(self, text: str) -> int | None:
        """The special token that is this text; None if it is ordinary text."""
        return self.special_ids.get(text)


class _Declared(msgspec.Struct):
    special: bool = False


class _Settings(msgspec.Struct):
    added_tokens_decoder: dict[int, _Declared] = {}


class Vocabulary(msgspec.Struct, frozen=True):
    """What tells which tokens a model has.

    Attributes:
        model_dir: the checkpoint: a directory or a GGUF file.
        vocab_size: of the model, which may be larger than the tokenizer's.
        eos_token_ids: the ids that end a text.
    """

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> Tokens:
        """Load the tokenizer, which takes some tenths of a second.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer of a kind that llguidance knows.
        """
        ends = [each for each in self.eos_token_ids if 0 <= each < self.vocab_size]
        try:
            hidden = hide_special_tokens(self._read(), {*ends, *self._declared()})
            eos = ends or hidden.default_ends or None
            try:
                made = LLTokenizer(hidden.text, n_vocab=self.vocab_size, eos_token=eos, slices=_GROUPS)
            except ValueError:
                # The tokenizer has tokens that the model lacks.
                made = LLTokenizer(hidden.text, eos_token=eos, slices=_GROUPS)
        except (OSError, ValueError, ModelError) as error:
            raise InvalidRequestError(
                "structured output is not supported with this checkpoint: it needs a tokenizer.json, or a "
                f"tokenizer in the GGUF file, that can be read ({type(error).__name__})"
            ) from error
        return Tokens(made, hidden.ids)

    def _read(self) -> str:
        """The tokenizer as tokenizer.json has it."""
        path = Path(self.model_dir)
        if path.is_file():
            # Imported only here: it takes a tenth of a second.
            from naiad.gguf import GGUFFile
            from naiad.gguf.tokenizer import read_gguf_tokenizer

            text: str = read_gguf_tokenizer(GGUFFile(path)).tokenizer.to_str()
            return text
        return (path / "tokenizer.json").read_text(encoding="utf-8")

    def _declared(self) -> list[int]:
        """The ids that are special for tokenizer_config.json."""
        path = Path(self.model_dir) / "tokenizer_config.json"
        if not path.is_file():
            return []
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=_Settings)
        except (msgspec.DecodeError, OSError, RecursionError):
            # Whoever reads texts says what is wrong.
            return []
        return [token_id for token_id, token in settings.added_tokens_decoder.items() if token.special]
