"""The text of special tokens in grammars is text: ordinary tokens spell it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from naiad.grammar import Grammars
from naiad.sequence import GrammarKind, GrammarSpec

# The first ends a text, the last is no special token for others than llguidance.
MARKS = ("</s>", "<|im_end|>", "<|im_start|>", "<tool → call>")
EOS = ("</s>", "<|im_end|>")
MAX_STEPS = 200


class Checkpoint:
    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        write_tokenizer(folder, tokenizer)
        vocab_size = tokenizer.get_vocab_size() + 7
        self.eos_ids = tuple(tokenizer.token_to_id(each) for each in EOS)
        self.grammars = Grammars(folder, vocab_size, self.eos_ids)
        self.special_ids = {tokenizer.token_to_id(each) for each in MARKS} - {None}

    def walk(self, spec: GrammarSpec, seed: int) -> list[int]:
        """The ids of a text that is drawn from what the masks allow, without its end."""
        draw, filler, matcher = (
            random.Random(seed),
            self.grammars.mask_filler(),
            self.grammars.get(spec).matcher(),
        )
        token_ids: list[int] = []
        for _ in range(MAX_STEPS):
            mask = filler.empty_masks(1)
            filler.fill(mask, {0: matcher})
            assert not matcher.error
            drafts = matcher.forced()
            assert matcher.num_allowed(drafts) == len(drafts)
            (allowed,) = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id in self.eos_ids:
                assert matcher.is_complete
                return token_ids
            token_ids.append(token_id)
            matcher.advance([token_id])
        raise AssertionError("the text does not end")


@pytest.fixture(scope="module", params=["byte_level", "sentence_piece"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpoint]:
    made = Checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_tokenizer(request.param))
    with closing(made.grammars):
        yield made


def written(text: str) -> dict[str, tuple[GrammarSpec, set[str]]]:
    """Grammars of each kind in which a text stands, and the texts that they allow."""
    obj = {
        "type": "object",
        "properties": {text: {"const": 1}},
        "required": [text],
        "additionalProperties": False,
    }
    one = json.dumps(text, ensure_ascii=False)
    kinds = {
        "const": (GrammarKind.JSON_SCHEMA, json.dumps({"const": text}), {one}),
        "enum": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [text, text + "!", "b"]}),
                 {one, json.dumps(text + "!", ensure_ascii=False), '"b"'}),
        "property": (GrammarKind.JSON_SCHEMA, json.dumps(obj), {f"{{{one}: 1}}"}),
        "pattern": (GrammarKind.JSON_SCHEMA,
                    json.dumps({"type": "string", "pattern": f"^{re.escape(text)}$"}), {one}),
        "choice": (GrammarKind.CHOICE, json.dumps([text]), {text}),
        "choices": (GrammarKind.CHOICE, json.dumps([f"a{text}b", text, "c"]), {f"a{text}b", text, "c"}),
        "regex": (GrammarKind.REGEX, f"[ab]{re.escape(text)}", {f"a{text}", f"b{text}"}),
        "GBNF": (GrammarKind.EBNF, f'root ::= {one} "x"', {f"{text}x"}),
        "Lark": (GrammarKind.LARK, f"start: X {one}\nX: /x/ // {text}", {f"x{text}"}),
    }  # fmt: skip
    return {
        name: (GrammarSpec(kind=kind, source=source), texts) for name, (kind, source, texts) in kinds.items()
    }


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("kind", written(""))
def test_ordinary_tokens_spell_the_text_of_special_ones(checkpoint: Checkpoint, kind: str, mark: str) -> None:
    if checkpoint.tokenizer.token_to_id(mark) is None:
        pytest.skip("the tokenizer has no such token")
    spec, texts = written(mark)[kind]
    for seed in range(2):
        token_ids = checkpoint.walk(spec, seed)
        assert checkpoint.special_ids.isdisjoint(token_ids)
        assert checkpoint.tokenizer.decode(token_ids, skip_special_tokens=False) in texts


def test_a_grammar_in_lark_may_name_special_tokens(checkpoint: Checkpoint) -> None:
    mark_id = checkpoint.tokenizer.token_to_id("<|im_start|>")
    source = f'start: "<|im_start|>" <|im_start|> /x\\/<s>/ <[{mark_id}]> %json {{"const": "<|im_start|>"}}'
    token_ids = checkpoint.walk(GrammarSpec(kind=GrammarKind.LARK, source=source), 0)
    assert token_ids.count(mark_id) == 2
    text = checkpoint.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text == '<|im_start|><|im_start|>x/<s><|im_start|>"<|im_start|>"'


def test_merges_make_no_special_token_and_an_end_is_always_special(tmp_path: Path) -> None:
    """As in checkpoints of the Gemma family, and ones whose end is a token like others."""
    made = json.loads(tiny_tokenizer("sentence_piece").to_str())
    vocab = made["model"]["vocab"]
    for token in ("<", ">", "<t", "<t>"):
        vocab.setdefault(token, len(vocab))
    made["model"]["merges"] += [["<", "t"], ["<t", ">"]]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_tokens([AddedToken("<t>", normalized=False)])
    checkpoint = Checkpoint(tmp_path, tokenizer)
    end = tokenizer.token_to_id("st")
    checkpoint.eos_ids, mark_id = (end,), tokenizer.token_to_id("<t>")
    with closing(Grammars(tmp_path, tokenizer.get_vocab_size(), checkpoint.eos_ids)) as checkpoint.grammars:
        for text in ("a<t>", "astop", "st"):
            spec = GrammarSpec(kind=GrammarKind.CHOICE, source=json.dumps([text]))
            token_ids = checkpoint.walk(spec, 0)
            assert {end, mark_id}.isdisjoint(token_ids)
            assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_tokens_that_are_special_for_the_checkpoint_alone_are_no_text(tmp_path: Path) -> None:
    """Their text would be left out of the output."""
    tokenizer = tiny_tokenizer("byte_level")
    tokenizer.add_tokens([AddedToken("[A]", normalized=False), AddedToken("[B]", normalized=False)])
    first, second = map(tokenizer.token_to_id, ("[A]", "[B]"))
    checkpoint = Checkpoint(tmp_path, tokenizer)
    declared = {first: {"content": "[A]", "special": True}, second: {"content": "[B]", "lstrip": False}}
    write_tokenizer(tmp_path, tokenizer, added_tokens_decoder=declared)
    spec = GrammarSpec(kind=GrammarKind.CHOICE, source='["x[A][B]"]')
    with closing(checkpoint.grammars):
        token_ids = checkpoint.walk(spec, 0)
    assert first not in token_ids
    assert second in token_ids
    assert tokenizer.decode(token_ids) == "x[A][B]"
