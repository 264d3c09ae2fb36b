"""Builds the tokenizer that a GGUF file describes in its metadata.

There are two kinds: byte-level BPE with the merges in the file, whose text is cut by a pattern that the file
names, and SentencePiece's BPE, whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from naiad.errors import ModelError
from naiad.gguf.file import GGUFFile

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut before tokens are merged.

    Attributes:
        pattern: the pieces; empty: those of GPT-2.
        digits_apart: each digit is a piece of its own.
        prefers_whole: a piece that is a token is taken whole, whatever the merges say.
        adds_begin: texts begin with the begin-of-text token unless the file says otherwise.
        composes: characters are composed (NFC) before.
    """

    pattern: str = ""
    digits_apart: bool = False
    prefers_whole: bool = False
    adds_begin: bool = False
    composes: bool = False


_LLAMA_3_CUT = _Cut(_LLAMA_3, prefers_whole=True, adds_begin=True)
_QWEN_2_CUT = _Cut(_QWEN_2, composes=True)
_DIGITS_CUT = _Cut(digits_apart=True)
# The names that files give to ways of cutting.
_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "llama-bpe": _LLAMA_3_CUT,
    "llama3": _LLAMA_3_CUT,
    "llama-v3": _LLAMA_3_CUT,
    "qwen2": _QWEN_2_CUT,
    "deepseek-r1-qwen": _QWEN_2_CUT,
    "tekken": _Cut(_TEKKEN, prefers_whole=True, adds_begin=True),
}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The tokenizer of a file.

    Attributes:
        tokenizer: without a post-processor.
        settings: as tokenizer_config.json would have them.
    """

    tokenizer: tokenizers.Tokenizer
    settings: dict[str, Any]


def read_gguf_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer.

    Raises:
        ModelError: the metadata describes none, or one that is not supported; names the key.
    """
    tokens = _list(file, "tokens", str)
    kinds = _list(file, "token_type", int) if _PREFIX + "token_type" in file.metadata else [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.bad_key(_PREFIX + "token_type", len(kinds), f"{len(tokens)} types")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise file.bad_key(_PREFIX + "tokens", len(tokens), "tokens that are all different")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    model = file.metadata.get(_PREFIX + "model")
    if not isinstance(model, str) or model not in builders:
        raise file.bad_key(_PREFIX + "model", model, f"one of {', '.join(builders)}")
    try:
        tokenizer, adds_begin = builders[model](file, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{file.name}: the tokenizer can not be built: {error}") from error
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, each in zip(tokens, kinds, strict=True)
            if each == kind and token
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    return GGUFTokenizer(tokenizer, _settings(file, tokens, adds_begin))


def _list(file: GGUFFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(_PREFIX + name)
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        raise file.bad_key(_PREFIX + name, values, f"a list of {kind.__name__}")
    return values


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise file.bad_key(_PREFIX + name, value, "true or false")
    return value


def _byte_level(file: GGUFFile, vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = file.metadata.get(_PREFIX + "pre")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise file.bad_key(_PREFIX + "pre", name, f"one of {', '.join(_CUTS)}")
    merges = [tuple(each.split(" ")) for each in _list(file, "merges", str)]
    if not all(len(each) == 2 for each in merges):
        raise file.bad_key(_PREFIX + "merges", merges[:3], "pairs with a space between them")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.prefers_whole)
    )
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits_apart else []
    if cut.pattern:
        first = [pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_begin


def _sentence_piece(file: GGUFFile, vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _list(file, "scores", float)
    if len(scores) != len(vocabulary):
        raise file.bad_key(_PREFIX + "scores", len(scores), f"{len(vocabulary)} scores")
    unknown = file.metadata.get(_PREFIX + "unknown_token_id")
    tokens = list(vocabulary)
    unknown_token = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(file, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the tokens with the best scores first."""
    found = []
    for token, token_id in vocabulary.items():
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[token_id], pair) for pair in known]
    found.sort(key=lambda each: each[0])
    return [pair for _, pair in found]


def _settings(file: GGUFFile, tokens: list[str], adds_begin: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "add_bos_token": _flag(file, "add_bos_token", adds_begin),
        "add_eos_token": _flag(file, "add_eos_token", False),
    }
    for name, key in _NAMED.items():
        token_id = file.metadata.get(_PREFIX + key)
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise file.bad_key(_PREFIX + key, token_id, f"an id in [0, {len(tokens)})")
        settings[name] = tokens[token_id]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise file.bad_key("tokenizer.chat_template", template, "a text")
    return settings | ({"chat_template": template} if template else {})
