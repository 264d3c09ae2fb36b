"""A tiny checkpoint that can write text, grammars for it, and an oracle for what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import SPECIAL_TOKENS, byte_level_tokenizer, write_tokenizer
from naiad.grammar import Grammars
from naiad.sequence import FinishReason, GrammarKind, GrammarSpec

# More ids than the tokenizer has: a padded head.
VOCAB_SIZE = 473
EOS_IDS = (1, 3)


def grammar_checkpoint(folder: Path, architecture: str = "LlamaForCausalLM", **overrides: Any) -> Path:
    """A random model with a byte-level tokenizer, two ids that end a text, and a padded vocabulary."""
    write_tokenizer(folder, byte_level_tokenizer())
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": list(EOS_IDS), **overrides}
    make_tiny_model(folder, architecture, **sizes)
    return folder


def tiny_grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB_SIZE, EOS_IDS)


def ids_with_special(grammars: Grammars, text: str) -> list[int]:
    """The ids of a text in which there may be special tokens of the byte-level tokenizer."""
    token_ids: list[int] = []
    for part in re.split("|".join(f"({re.escape(each)})" for each in SPECIAL_TOKENS), text):
        if part in SPECIAL_TOKENS:
            token_ids.append(SPECIAL_TOKENS.index(part))
        elif part:
            token_ids += grammars.tokenizer.tokenize_str(part)
    return token_ids


def schema(properties: dict[str, Any], **more: Any) -> GrammarSpec:
    """An object in which every property is required."""
    whole = {"type": "object", "properties": properties, "required": list(properties), **more}
    return GrammarSpec(
        kind=GrammarKind.JSON_SCHEMA, source=json.dumps({"additionalProperties": False, **whole})
    )


def regex(source: str, begins_after: str = "") -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, source=source, begins_after=begins_after)


PERSON = schema({"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}})
FIXED = schema({"status_of_the_order": {"const": "delivered"}, "is_paid": {"type": "boolean"}})
TREE = GrammarSpec(
    kind=GrammarKind.JSON_SCHEMA,
    source=json.dumps(
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"enum": [1, "two", None]},
                        "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["v", "left"],
                    "additionalProperties": False,
                }
            },
        }
    ),
)
SPECS = (
    PERSON,
    FIXED,
    TREE,
    GrammarSpec(kind=GrammarKind.JSON_OBJECT),
    regex(r"[a-f]{3}-\d{2,4}( is it)?"),
    GrammarSpec(kind=GrammarKind.CHOICE, source='["yes", "no", "not at all", "\\"é\\" / 👍"]'),
    GrammarSpec(kind=GrammarKind.EBNF, source='root ::= [0-9]+ (" fox" | " dog" root)'),
    GrammarSpec(kind=GrammarKind.LARK, source='start: "quick" WORD+\nWORD: /[ ,.]?[jumps]{1,4}/'),
    regex(r"(ab|cd){2,5}", begins_after="e"),
)


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def check_text(
    grammars: Grammars,
    tokenizer: Tokenizer,
    spec: GrammarSpec,
    token_ids: list[int],
    reason: FinishReason | None,
) -> None:
    """Check that an output follows its grammar, and is complete if it ended by itself."""
    matcher = grammars.get(spec).matcher()
    matcher.advance(token_ids)
    assert not matcher.error, (spec, text_of(tokenizer, token_ids), matcher.error)
    if reason is FinishReason.STOP:
        assert matcher.is_complete, (spec, text_of(tokenizer, token_ids))
        if spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            value = json.loads(text_of(tokenizer, token_ids))
            jsonschema.validate(value, json.loads(spec.source or '{"type": "object"}'))
