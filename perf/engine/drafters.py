"""Measures the cost of free drafters by the length of the text, and of `plan` by the batch size.

    python -m perf.engine.drafters

The text consists of recurring phrases, some more frequent than others. Drafts are first compared with
those of a scan over the whole text, and timed only if they are equal. "Read" is the cost of reading the
prompt once, "step" that of a call with one new token: medians of the thread's CPU time. Memory is what a
drafter holds for a text of that length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from perf.common.report import write_report

from naiad.sequence import SamplingParams, Sequence
from naiad.speculation.drafter import MAX_READ_TOKENS, TextDrafter
from naiad.speculation.ngram_drafter import NGramDrafter
from naiad.speculation.policy import AcceptanceState, DraftRow, SpeculationPolicy
from naiad.speculation.step_cost import StepCost
from naiad.speculation.suffix_automaton import MAX_COUNT
from naiad.speculation.suffix_drafter import SuffixDrafter

_NUM_STEPS = 200
_NUM_DRAFT_TOKENS = 8
_CHECKED_TOKENS = 1000
_DRAFTERS: dict[str, Callable[[], TextDrafter]] = {"ngram": NGramDrafter, "suffix": SuffixDrafter}


def main() -> int:
    """Compare with a scan, measure, print and write the results; return 1 if a draft differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1000,10000,100000", metavar="N,…")
    parser.add_argument("--batch", default="1,8,32,256", metavar="N,…")
    args = parser.parse_args()
    if not (_ngram_is_right() and _suffix_is_right()):
        print("drafts differ from those of a scan: no figure is shown", file=sys.stderr)
        return 1
    lengths = [int(part) for part in args.tokens.split(",")]
    drafts = [measure(name, length) for name in _DRAFTERS for length in lengths]
    plans: list[dict[str, Any]] = [measure_plan(int(part)) for part in args.batch.split(",")]
    print(f"{'drafter':<8}{'tokens':>8}{'read':>15}{'a step':>12}{'memory':>16}")
    for each in drafts:
        print(
            f"{each['drafter']:<8}{each['tokens']:>8}{each['read_us_per_token']:>6.2f} µs/token"
            f"{each['step_us']:>9.1f} µs{each['bytes_per_token']:>10.0f} B/token"
        )
    for each in plans:
        print(f"plan of {each['batch']:>4} rows {each['plan_us']:>8.1f} µs")
    print("written:", write_report("drafters", vars(args), [*drafts, *plans]))
    return 0


def measure(name: str, num_tokens: int) -> dict[str, str | float]:
    """Microseconds to read a prompt and to propose at its end, and the bytes held."""
    text = _text(num_tokens + _NUM_STEPS)
    drafter, sequence = _DRAFTERS[name](), _sequence(text[:num_tokens])
    start_s = time.thread_time()
    _read(drafter, sequence)
    read_s = time.thread_time() - start_s
    steps_s = []
    for token_id in text[num_tokens:]:
        sequence.token_ids.append(token_id)
        start_s = time.thread_time()
        drafter.guess(sequence, _NUM_DRAFT_TOKENS)
        steps_s.append(time.thread_time() - start_s)
    return {
        "drafter": name,
        "tokens": num_tokens,
        "read_us_per_token": round(1e6 * read_s / num_tokens, 3),
        "step_us": round(1e6 * statistics.median(steps_s), 2),
        "bytes_per_token": round(_held_bytes(name, text[:num_tokens]) / num_tokens, 1),
    }


def measure_plan(num_rows: int) -> dict[str, float]:
    """Microseconds to distribute draft tokens in a batch that is far from full."""
    policy = SpeculationPolicy(StepCost([(1, 1.0), (8, 1.35), (64, 4.15), (4096, 270.0)]))
    rows = [DraftRow(AcceptanceState(), _NUM_DRAFT_TOKENS) for _ in range(num_rows)]
    plans_s = []
    for _ in range(_NUM_STEPS):
        start_s = time.thread_time()
        policy.plan(rows, num_rows)
        plans_s.append(time.thread_time() - start_s)
    return {"batch": num_rows, "plan_us": round(1e6 * statistics.median(plans_s), 1)}


def _held_bytes(name: str, text: list[int]) -> int:
    sequence = _sequence(text)
    tracemalloc.start()
    drafter = _DRAFTERS[name]()
    _read(drafter, sequence)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def _read(drafter: TextDrafter, sequence: Sequence) -> None:
    for _ in range(0, sequence.num_tokens, MAX_READ_TOKENS):
        drafter.guess(sequence, 0)


def _sequence(token_ids: list[int]) -> Sequence:
    return Sequence(1, list(token_ids), len(token_ids), SamplingParams(max_tokens=1), 0.0)


def _text(num_tokens: int) -> list[int]:
    draw = random.Random(5)
    phrases = [[draw.randrange(40_000) for _ in range(draw.randint(1, 12))] for _ in range(num_tokens // 8)]
    text: list[int] = []
    while len(text) < num_tokens:
        # Phrases with smaller numbers are more frequent.
        text += phrases[int(len(phrases) * draw.random() ** 3)]
    return text[:num_tokens]


def _ngram_is_right() -> bool:
    drafter, text = NGramDrafter((3, 2)), _text(_CHECKED_TOKENS)
    sequence = _sequence(text[:1])
    for end in range(2, _CHECKED_TOKENS):
        sequence.token_ids.append(text[end - 1])
        places = [_places(text, end, size) for size in (3, 2)]
        expected = [text[each[-1]] for each in places if each][:1]
        if drafter.guess(sequence, 1) != expected:
            return False
    return True


def _suffix_is_right() -> bool:
    drafter, text = SuffixDrafter(min_chance=0.0), _text(_CHECKED_TOKENS)
    sequence = _sequence(text[:1])
    for end in range(2, _CHECKED_TOKENS):
        sequence.token_ids.append(text[end - 1])
        size = 0
        while _places(text, end, size + 1):
            size += 1
        followers = [text[place] for place in _places(text, end, size)] if size else []
        draft = drafter.guess(sequence, 1)
        if len(set(followers)) > MAX_COUNT:
            continue
        times = {token: min(followers.count(token), MAX_COUNT) for token in followers}
        if bool(draft) != bool(followers) or (draft and times[draft[0]] != max(times.values())):
            return False
    return True


def _places(text: list[int], end: int, size: int) -> list[int]:
    """The positions after earlier occurrences of the `size` tokens before `end`."""
    last = text[end - size : end]
    if size > end:
        return []
    return [place for place in range(size, end) if text[place - size : place] == last]


if __name__ == "__main__":
    sys.exit(main())
