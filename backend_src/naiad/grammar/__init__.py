"""Structured output: compiles grammars and follows texts through them, with llguidance."""

from naiad.grammar.compiler import CompiledGrammar, Grammars
from naiad.grammar.matcher import GrammarMatcher, MaskFiller

__all__ = ["CompiledGrammar", "GrammarMatcher", "Grammars", "MaskFiller"]
