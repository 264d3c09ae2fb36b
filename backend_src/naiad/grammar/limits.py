"""Limits of a grammar. All but seconds and memory are deterministic."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_SOURCE_BYTES = 512 * 1024
# Small sources may take less time than others, and never wait behind them.
MAX_SMALL_SOURCE_BYTES = 32 * 1024
MAX_BEGINS_AFTER_BYTES = 256
# Seconds of a core's time that a grammar may take in the process that tries it, and the memory that it may
# take there.
SMALL_WORK_S, LARGE_WORK_S = 2, 10
# The timeout is for cores that others use. An engine with nothing else to do sends nothing while a helper
# works, so the timeout is at most half of `ClientTimings.watchdog_s`, after which an engine is killed: a
# grammar may be tried twice.
HELPER_TIMEOUT_S = 60.0
HELPER_MEMORY_BYTES = 1 << 30
# Compiled grammars that no sequence uses are kept up to these totals.
MAX_KEPT_GRAMMARS = 128
MAX_KEPT_SOURCE_BYTES = 8 * 1024 * 1024
# Work that a lexer may do when the grammar is compiled, and for each mask; states that it may have; sizes.
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
# A row of the parser takes a time that grows with the square of its items: 2,000 take about a millisecond.
# llguidance counts a row when it has made it, so the grammar's size bounds the first one that is too long.
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 20_000
# Each has four items in a row, wherever the object is.
MAX_OPTIONAL_PROPERTIES = 450


def parser_limits() -> LLParserLimits:
    """Return the limits in llguidance's form; its messages then do not quote the grammar."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
