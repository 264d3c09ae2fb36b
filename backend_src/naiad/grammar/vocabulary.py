"""A checkpoint's tokenizer in llguidance's form."""

from __future__ import annotations

from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from naiad.errors import InvalidRequestError, ModelError
from naiad.gguf import GGUFFile
from naiad.gguf.tokenizer import read_gguf_tokenizer

# Tokens that are text of a JSON string, in groups by their length. If a mask allows a whole group, llguidance
# does not look at each token; with this many groups that holds near the end of a string with `maxLength` too.
_OF_A_STRING = r'[^"\\\x00-\x1F\x7F]'
_GROUPS = [*(f"{_OF_A_STRING}{{1,{length}}}" for length in (3, 6, 9, 12, 15, 30)), f"{_OF_A_STRING}+"]


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

    def load(self) -> LLTokenizer:
        """Load the tokenizer, which takes some tenths of a second.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer of a kind that llguidance knows.
        """
        eos = [each for each in self.eos_token_ids if 0 <= each < self.vocab_size] or None
        try:
            text = self._read()
            try:
                return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos, slices=_GROUPS)
            except ValueError:
                # The tokenizer has tokens that the model lacks.
                return LLTokenizer(text, eos_token=eos, slices=_GROUPS)
        except (OSError, ValueError, ModelError) as error:
            raise InvalidRequestError(
                "structured output is not supported with this checkpoint: it needs a tokenizer.json, or a "
                f"tokenizer in the GGUF file, that can be read ({type(error).__name__})"
            ) from error

    def _read(self) -> str:
        """The tokenizer as tokenizer.json has it."""
        path = Path(self.model_dir)
        if path.is_file():
            text: str = read_gguf_tokenizer(GGUFFile(path)).tokenizer.to_str()
            return text
        return (path / "tokenizer.json").read_text(encoding="utf-8")


def special_id(text: str, tokenizer: LLTokenizer) -> int | None:
    """The special token that is this text; None if it is ordinary text."""
    ids = tokenizer.tokenize_str(text, parse_special=True) if text else []
    return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None
