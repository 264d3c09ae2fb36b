"""Compiles one grammar."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from naiad.grammar.limits import parser_limits
from naiad.grammar.matcher import GrammarMatcher, MaskFiller
from naiad.grammar.source import to_llguidance
from naiad.grammar.vocabulary import Tokens
from naiad.sequence import GrammarSpec


def compile_text(spec: GrammarSpec, tokens: Tokens) -> tuple[str, GrammarMatcher]:
    """Translate a grammar and compile it.

    Returns:
        The grammar in llguidance's form, and a matcher at the start of a text.

    Raises:
        ValueError: it is malformed, too large or not supported; the message says why.
    """
    text = to_llguidance(spec, tokens.special_ids)
    return text, compile_translated(text, tokens.tokenizer)


def compile_translated(text: str, tokenizer: LLTokenizer) -> GrammarMatcher:
    """Compile a grammar in llguidance's form; return a matcher at the start of a text.

    Raises:
        ValueError: as `compile_text`.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    start = GrammarMatcher(matcher)
    # The first mask costs far more than others; clones share what it has computed.
    filler = MaskFiller(tokenizer, num_threads=1)
    masks = filler.empty_masks(1)
    filler.fill(masks, {0: start})
    if not masks.any():
        raise ValueError("no text satisfies it" if "NoExtension" in start.error else start.error)
    return start
