"""Keeps the text of special tokens apart from the tokens.

llguidance splits forced text into tokens as the checkpoint's tokenizer does, which takes the text of a
special token for the token. So special tokens get names that no client can know, and others spell their text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

# Strings, comments and regular expressions of Lark, in which a token's name is text, or the name of a token.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)', re.DOTALL)
# Ends of a text that llguidance knows where a model names none.
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>")


class HiddenTokens(msgspec.Struct, frozen=True):
    """A tokenizer without the text of its special tokens.

    Attributes:
        text: as tokenizer.json has it.
        ids: text → id of each special token.
    """

    text: str
    ids: dict[str, int]

    @property
    def default_ends(self) -> list[int]:
        """The id that ends a text if the model says nothing about it; or none."""
        return sorted(self.ids[each] for each in _ENDS if each in self.ids)[-1:]


def hide_special_tokens(text: str, special_ids: Collection[int]) -> HiddenTokens:
    """Rename a tokenizer's special tokens.

    Args:
        text: as tokenizer.json has it.
        special_ids: ids that are special whether or not the tokenizer says so, as those that end a text.

    Raises:
        ValueError: it is no tokenizer.
    """
    try:
        whole = msgspec.json.decode(text)
        model, added = whole["model"], whole.get("added_tokens") or []
        ids = {
            each["content"]: each["id"] for each in added if _is_special(each) or each["id"] in special_ids
        }
        left = set(special_ids) - {each["id"] for each in added}
        ordinary = {token: number for token, number in _numbered(model) if number in left}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no tokenizer: {error!r}") from error
    ids |= ordinary
    # Between angle brackets llguidance takes any added token for a special one.
    salt = secrets.token_hex(16)
    names = {token: f"<{salt}-{number}>" for token, number in ids.items()}
    whole["added_tokens"] = [
        *({**each, "content": names.get(each["content"], each["content"])} for each in added),
        *(_added(names[token], number) for token, number in ordinary.items()),
    ]
    _rename(model, names)
    # They are for whole texts.
    whole |= {"truncation": None, "padding": None}
    return HiddenTokens(msgspec.json.encode(whole).decode(), ids)


def with_ids(lark: str, ids: Mapping[str, int]) -> str:
    """Write the ids of special tokens for their names in a grammar in Lark."""

    def written(found: re.Match[str]) -> str:
        token_id = ids.get(found.group(1))
        return found.group() if token_id is None else f"<[{token_id}]>"

    return _LARK.sub(written, lark)


def _is_special(added: Mapping[str, Any]) -> bool:
    """Whether an added token is no text for llguidance."""
    content = added["content"]
    return bool(added.get("special")) or (content.startswith("<") and content.endswith(">"))


def _added(name: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True, **flags}


def _numbered(model: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The tokens of a model and their ids."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, number) for number, (token, _) in enumerate(vocab)]


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens of a model; leave out merges that make them, as these would make them of their text."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        for token in names.keys() & vocab.keys():
            vocab[names[token]] = vocab.pop(token)
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if names.keys().isdisjoint(_tokens_of(each))]


def _tokens_of(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
