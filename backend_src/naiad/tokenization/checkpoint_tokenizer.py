"""Reads a checkpoint's tokenizer.json and the files beside it that describe the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from naiad.config.checkpoint_json import parse_json
from naiad.errors import ModelError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


# Encoding fewer characters takes about a millisecond.
_LONG_CHARS = 4096


def encode_text(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode a text; other threads run while a long one is encoded."""
    if len(text) < _LONG_CHARS:
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        # Only this one of the two releases the interpreter's lock.
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """A tokenizer as the checkpoint's files define it.

    Attributes:
        tokenizer: every special token of the files is marked as special.
        settings: special_tokens_map.json, overridden by tokenizer_config.json; empty if neither exists.
        special_ids: ids that produce no text when special tokens are skipped.
        chat_template: Jinja source, or None.
    """

    tokenizer: tokenizers.Tokenizer
    settings: dict[str, Any]
    special_ids: frozenset[int]
    chat_template: str | None

    @classmethod
    def load(cls, model_dir: str | Path) -> CheckpointTokenizer:
        """Read the files of `model_dir`, or a GGUF file.

        Raises:
            ModelError: tokenizer.json is missing, or a file is damaged or contradicts another.
        """
        folder = Path(model_dir)
        if folder.is_file():
            # Imported only here: it takes a tenth of a second.
            from naiad.gguf import GGUFFile
            from naiad.gguf.tokenizer import read_gguf_tokenizer

            described = read_gguf_tokenizer(GGUFFile(folder))
            return cls._of(described.tokenizer, described.settings, described.settings.get("chat_template"))
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError("the model directory has no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"tokenizer.json can not be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_settings(folder)
        return cls._of(tokenizer, settings, _read_chat_template(folder, settings))

    @classmethod
    def _of(
        cls, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any], chat_template: str | None
    ) -> CheckpointTokenizer:
        _mark_special_tokens(tokenizer, settings)
        _set_post_processor(tokenizer, settings)
        special_ids = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        return cls(tokenizer, settings, frozenset(special_ids), chat_template)

    def named_token(self, name: str) -> str | None:
        """The text of `bos_token`, `eos_token`, …, or None."""
        return _token_text(self.settings.get(name))

    def named_token_id(self, name: str) -> int | None:
        """The id of `bos_token`, `eos_token`, …, or None.

        Raises:
            ModelError: the files name a token that tokenizer.json does not have.
        """
        token = self.named_token(name)
        if token is None:
            return None
        token_id: int | None = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise ModelError(f"tokenizer_config.json: {name} = {token!r} is not in tokenizer.json")
        return token_id


def read_chat_template(model_dir: Path) -> str | None:
    """Return the source of the checkpoint's chat template without loading its tokenizer; None: it has none.

    Raises:
        ModelError: a file is damaged.
    """
    return _read_chat_template(model_dir, _read_settings(model_dir))


def _read_settings(folder: Path) -> dict[str, Any]:
    return {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} holds {type(value).__name__}: expected an object")
    return value


def _token_text(value: object) -> str | None:
    """Read a token, which is written as a string or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _mark_special_tokens(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Mark the tokens that tokenizer_config.json declares special, without growing the vocabulary."""
    declared = settings.get("added_tokens_decoder") or {}
    for key, entry in declared.items():
        content = _token_text(entry)
        if content is None or not entry.get("special") or str(tokenizer.token_to_id(content)) != key:
            continue
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        tokenizer.add_special_tokens([AddedToken(content, special=True, **flags)])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for content in _named_special_tokens(settings):
        if content not in known and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _named_special_tokens(settings: dict[str, Any]) -> Iterator[str]:
    for name in NAMED_TOKENS:
        content = _token_text(settings.get(name))
        if content is not None:
            yield content
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name) or []
        for entry in more.values() if isinstance(more, dict) else more:
            content = _token_text(entry)
            if content is not None:
                yield content


def _set_post_processor(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Add begin and end of text as the settings say; without settings tokenizer.json decides."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    template = ["$A"]
    special_tokens = []
    for key, name, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", 2)):
        content = _token_text(settings.get(name))
        token_id = tokenizer.token_to_id(content) if content is not None else None
        if settings.get(key) and content is not None and token_id is not None:
            template.insert(place, content)
            special_tokens.append((content, token_id))
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
