"""What a matcher says of one token, beside the mask of the same place."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from helpers.grammars import EOS_IDS, SPECS, VOCAB_SIZE, regex
from helpers.tiny_tokenizers import tiny_tokenizer, write_tokenizer
from naiad.grammar import GrammarMatcher, Grammars, MaskFiller

FORCED = regex("a quick( brown)? fox jumps over the lazy dog")
# Strings of many lengths, for which llguidance prepares groups of tokens.
STRING = regex('"[^"]{0,30}"')


def allowed_ids(filler: MaskFiller, matcher: GrammarMatcher) -> set[int]:
    masks = filler.empty_masks(1)
    filler.fill(masks, {0: matcher})
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_token_that_is_surely_allowed_is_in_the_mask(tmp_path: Path, kind: str) -> None:
    """At random places of random texts, for every id; most tokens of a mask are surely allowed."""
    rng = random.Random(5)
    num_allowed = num_sure = num_forced = 0
    with closing(Grammars(write_tokenizer(tmp_path, tiny_tokenizer(kind)), VOCAB_SIZE, EOS_IDS)) as grammars:
        filler = grammars.mask_filler()
        for spec in (*SPECS, FORCED, STRING):
            matcher = grammars.get(spec).matcher()
            for _ in range(25):
                before = matcher.clone()
                sure = {each for each in range(VOCAB_SIZE) if matcher.surely_allows(each)}
                allowed = allowed_ids(filler, matcher)
                assert sure <= allowed, (spec, sure - allowed)
                assert allowed_ids(filler, before) == allowed, "asking has changed the matcher"
                num_forced += bool(matcher.forced())
                assert matcher.is_forced or not matcher.forced()
                num_allowed += len(allowed - {*EOS_IDS})
                num_sure += len(sure - {*EOS_IDS})
                matcher.advance([rng.choice(sorted(allowed))])
                if matcher.error or matcher.is_complete:
                    break
    assert num_sure > 0.9 * num_allowed
    assert num_forced > 5 or kind != "byte_level"


def test_nothing_is_surely_allowed_after_a_token_that_was_not(tmp_path: Path) -> None:
    with closing(
        Grammars(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")), VOCAB_SIZE, EOS_IDS)
    ) as grammars:
        matcher = grammars.get(regex("abc")).matcher()
        matcher.advance(grammars.tokenizer.tokenize_str("q"))
        assert matcher.error
        assert not any(matcher.surely_allows(each) for each in range(VOCAB_SIZE))


def test_tokens_without_masks_wear_no_grammar_out(tmp_path: Path) -> None:
    """Every token of this text costs a good part of what llguidance grants from one mask to the next."""
    spec = regex("((a{1,10}){1,10}){1,10}b")
    with closing(
        Grammars(write_tokenizer(tmp_path, tiny_tokenizer("byte_level")), VOCAB_SIZE, EOS_IDS)
    ) as grammars:
        filler = grammars.mask_filler()
        (token_id,) = grammars.tokenizer.tokenize_str("a")
        texts = [grammars.get(spec).matcher() for _ in range(2)]
        num_sure = 0
        for _ in range(100):
            for matcher in texts:
                if not matcher.is_due and matcher.surely_allows(token_id):
                    num_sure += 1
                else:
                    assert token_id in allowed_ids(filler, matcher), matcher.error
                matcher.advance([token_id])
                assert not matcher.error
    assert num_sure >= 100
