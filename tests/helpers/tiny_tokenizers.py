"""Small tokenizers of each supported kind, made in code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12 o'clock!\n",
    "  leading spaces,\ttabs and   runs of them",
    "你好，世界。我们在这里。",
    "مرحبا بالعالم",
    "e\u0301 a\u0308 o\u0323\u0302 combining",
    "👍🏽 👩‍👩‍👧 🇫🇷 😀😀",
    "stop STOP stopper END",
)
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = ("byte_level", "sentence_piece", "sentence_piece_no_strip", "metaspace")


def byte_level_tokenizer(lacks: str = "") -> Tokenizer:
    """Byte-level BPE; all 256 bytes are tokens, so any bytes can be made, except the bytes of `lacks`."""
    tokenizer = Tokenizer(models.BPE())
    by_byte = tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lacking = {letter for piece, _ in by_byte.pre_tokenize_str(lacks) for letter in piece}
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(set(pre_tokenizers.ByteLevel.alphabet()) - lacking),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool → call>", normalized=False)])
    return tokenizer


def sentence_piece_tokenizer(strip: bool = True) -> Tokenizer:
    """BPE with "▁" and byte fallback, as Llama 2 and Mistral have it."""
    base: list[str] = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(base)}
    alphabet = sorted({char for text in TEXTS[:2] for char in text.replace(" ", "▁")} | {"你", "好", "é"})
    words = [
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("o", "p"),
        ("s", "t"),
        ("st", "op"),
        ("▁", "▁"),
        ("▁", "a"),
    ]
    for token in [*alphabet, *(left + right for left, right in words)]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, words, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", *SPECIAL_TOKENS)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """BPE whose pre-tokenizer and decoder are Metaspace; no byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def tiny_tokenizer(kind: str) -> Tokenizer:
    """One of KINDS."""
    if kind == "byte_level":
        return byte_level_tokenizer()
    if kind == "metaspace":
        return metaspace_tokenizer()
    return sentence_piece_tokenizer(strip=kind == "sentence_piece")


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, template_file: str | None = CHAT_TEMPLATE, **settings: object
) -> Path:
    """Write the tokenizer files of a checkpoint into `folder`; `settings` go into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file)
    return folder
