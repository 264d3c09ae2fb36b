"""Random requests with the field names of `ensemble`; each field is in some of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helpers.contract_page import page_rows

PROMPTS = (
    "The quick brown fox",
    "  leading spaces,\tand a tab",
    "你好，世界。我们",
    "👍🏽 👩‍👩‍👧 🇫🇷",
    "It's 12 o'clock!\n" * 9,
    "<|im_start|>user\nstop STOP<|im_end|>",
)
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
STRINGS = ("e", "qu", " the", "。", "o'", "stop")
# Fields with a higher probability: without them there would be little to compare.
OFTEN = {
    **{"temperature": 0.75, "seed": 0.6, "exclude_input_in_output": 0.85},
    **dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), 0.8),
}
# Fields with a lower probability, because they make long answers.
SELDOM = {"return_context_logits": 0.1, "return_generation_logits": 0.1}
# The server requires the first as a tensor, and does not pass on the second as a gRPC parameter.
ONLY_TENSORS = {"max_tokens", "priority"}
WORD_LISTS = ("stop_words", "bad_words")
SCALARS = {row.name for row in page_rows("ensemble") if row.dims == "[1]" and not row.is_output}
KINDS = {row.name: row.dtype for row in page_rows("ensemble") if not row.is_output}
NO_DEADLINE_US = 600_000_000

Fields = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A request that is sent to every frontend.

    Attributes:
        rows: the fields of each row; all rows have the same fields.
        has_parameters: whether fields that may be parameters are sent as such, by callers that want them.
        timeout_us: a deadline that does not pass; 0 = none.
    """

    number: int
    rows: list[Fields]
    has_parameters: bool
    timeout_us: int

    @property
    def first(self) -> Fields:
        """The first row; fields that agree in all rows are read from it."""
        return self.rows[0]

    @property
    def has_beams(self) -> bool:
        return bool(self.first.get("beam_width", 1) > 1)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of a row; beams count as one."""
        return 1 if self.has_beams else int(self.first.get("num_return_sequences", 1))

    @property
    def num_texts(self) -> int:
        """Number of texts of a sequence, which has those of all beams."""
        return (
            int(self.first.get("num_return_sequences") or self.first["beam_width"]) if self.has_beams else 1
        )

    @property
    def has_echo(self) -> bool:
        return not self.first.get("exclude_input_in_output", False)

    def each_row(self) -> Iterator[Request]:
        """A request for each row."""
        return (replace(self, rows=[row]) for row in self.rows)

    def sent(self, stream: bool, by_parameters: bool = False) -> tuple[Fields, dict[str, Any]]:
        """The tensors, and the other arguments of a gRPC request."""
        names = self.parameters() | {"stream": stream} if by_parameters and self.has_parameters else {}
        rows = [row | {"stream": stream} for row in self.rows]
        tensors = {name: _tensor(name, [row[name] for row in rows]) for name in rows[0] if name not in names}
        return tensors, {"parameters": names} | ({"timeout": self.timeout_us} if self.timeout_us else {})

    def body(self, stream: bool) -> Fields:
        """The JSON body for the only row."""
        return self.first | {"stream": stream} | ({"timeout": self.timeout_us} if self.timeout_us else {})

    def parameters(self) -> Fields:
        """The fields that can be sent as parameters: single values that are the same in all rows."""
        found = {}
        for name, value in self.first.items() if self.has_parameters else ():
            if name in WORD_LISTS and len(value) == 1:
                value = value[0]
            may_be = isinstance(value, str) if name in WORD_LISTS else name in SCALARS - ONLY_TENSORS
            if may_be and all(row[name] == self.first[name] for row in self.rows):
                found[name] = value
        return found

    def labels(self) -> set[str]:
        """What the request covers."""
        named = {"beams": self.has_beams, "echo": self.has_echo, "several rows": len(self.rows) > 1}
        named |= {"timeout": self.timeout_us > 0, "no temperature": "temperature" not in self.first}
        named |= {"no seed": not {"seed", "random_seed"} & self.first.keys()}
        named |= {"beams with echo": self.has_beams and self.has_echo}
        values = {f"{name} = {row[name]}" for row in self.rows for name in row if name in CASES}
        held = {label for label, holds in named.items() if holds}
        return held | values | self.first.keys() | {f"{name} as parameter" for name in self.parameters()}


# Values with a meaning of their own.
CASES = {"top_p": (0.0, 1.0), "temperature": (0.0, 1.0), "top_k": (0, 1), "num_draft_tokens": (0,)}
LABELS = {f"{name} = {value}" for name, values in CASES.items() for value in values} | {
    *("beams", "echo", "several rows", "timeout", "no temperature", "no seed", "beams with echo"),
}


def draw(number: int) -> Request:
    """Draw a request; the same number gives the same request."""
    rng = random.Random(number)
    has_beams, num_rows, num_words = rng.random() < 0.25, rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 2))
    agreed = _agreed(rng, has_beams)
    many = [_of_a_row(rng, has_beams, num_words) | agreed for _ in range(num_rows)]
    shares = dict.fromkeys(many[0], 0.3) | OFTEN | SELDOM
    chosen = {name for name in many[0] if rng.random() < shares[name]}
    chosen |= {"max_tokens", "messages" if "messages" in chosen else "text_input"}
    chosen -= {"text_input"} if "messages" in chosen else set()
    chosen |= {"beam_width"} if has_beams else set()
    # A guide leaves few tokens, of which the allowed ones may be none.
    chosen -= {"allowed_token_ids"} if "guide" in chosen else set()
    rows = [_merged(options, chosen) for options in many]
    if not {"seed", "random_seed"} & chosen and not (has_beams or all(map(is_greedy, rows))):
        rows = [row | options["seed"] for row, options in zip(rows, many, strict=True)]
    return Request(number, rows, rng.random() < 0.4, NO_DEADLINE_US if rng.random() < 0.3 else 0)


def is_greedy(row: Fields) -> bool:
    """The rule in the compatibility page's section "Greedy or not"."""
    top_k, top_p = row.get("top_k", 0), row.get("top_p", 0.0)
    is_on = top_k > 0 or top_p > 0 or row.get("min_p", 0.0) > 0 or "top_n_sigma" in row
    temperature = row.get("temperature", 1.0)
    return bool(temperature == 0 or top_k == 1 or (temperature == 1 and not is_on))


def _merged(options: dict[str, Fields], chosen: set[str]) -> Fields:
    return {name: value for option in options if option in chosen for name, value in options[option].items()}


def _agreed(rng: random.Random, has_beams: bool) -> dict[str, Fields]:
    """Fields that must have the same value in all rows."""
    width = rng.randrange(2, 5) if has_beams else 1
    requested = ("finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens", "log_probs")
    logits = () if has_beams else ("context_logits", "generation_logits")
    fields: Fields = {
        "beam_width": width,
        "num_return_sequences": rng.randrange(1, width + 1 if has_beams else 4),
        "num_log_probs": 0 if has_beams else rng.choice((0, 1, 5)),
        "exclude_input_in_output": rng.random() < 0.7,
        **{f"return_{name}": True for name in (*requested, *logits, "perf_metrics")},
    }
    return {name: {name: value} for name, value in fields.items()}


def _of_a_row(rng: random.Random, has_beams: bool, num_words: int) -> dict[str, Fields]:
    """All other fields; the fields of an entry are sent together. Fractions are exact in every format."""
    max_tokens = rng.randrange(1, 17)
    min_tokens, seed = rng.randrange(max_tokens), rng.getrandbits(rng.choice((8, 62)))
    fields: Fields = {
        "text_input": rng.choice(PROMPTS),
        "messages": json.dumps([{"role": "user", "content": rng.choice(PROMPTS)}]),
        "max_tokens": max_tokens,
        **_drawing(rng, has_beams),
        **{"min_tokens": min_tokens, "min_length": min_tokens, "seed": seed, "random_seed": seed},
        **{f"{name}_penalty": rng.randrange(-8, 9) / 8 for name in ("presence", "frequency")},
        "repetition_penalty": rng.randrange(13, 25) / 16,
        **{name: rng.sample(STRINGS, num_words) for name in WORD_LISTS},
        "include_stop_str_in_output": True,
        **{"stop_token_ids": _ids(rng, 20), "allowed_token_ids": _ids(rng, 60)},
        "ignore_eos": True,
        **{"num_draft_tokens": rng.randrange(4), "priority": rng.randrange(-3, 3)},
        "cache_salt": f"tenant {rng.randrange(3)}",
        **{"end_id": rng.randrange(5, 390), "pad_id": rng.randrange(-1, 390)},
        **{"top_p_min": rng.randrange(4) / 8, "top_p_reset_ids": rng.randrange(-1, 390)},
    }
    return {name: {name: value} for name, value in fields.items()} | {
        "embedding_bias": {
            "embedding_bias_words": rng.sample(STRINGS, 2),
            "embedding_bias_weights": [2.0, -2.0],
        },
        "top_p_decay": {"top_p_decay": 1.0} if has_beams else {"top_p": 0.875, "top_p_decay": 0.75},
        "logit_bias": {"logit_bias_ids": _ids(rng, 4), "logit_bias_values": [3.0, -3.0, 1.0, 2.0]},
        **({} if has_beams else {"guide": _guide(rng)}),
    }


def _guide(rng: random.Random) -> Fields:
    kind, guide = rng.choice((("regex", "[a-z ]{1,40}"), ("ebnf_grammar", 'root ::= [a-m]+ "."')))
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}


def _drawing(rng: random.Random, has_beams: bool) -> Fields:
    """The drawing fields: with beams only values that do not draw; without beams their fields are off."""
    if has_beams:
        return {
            **{"temperature": rng.choice((0.0, 1.0)), "top_k": rng.choice((0, 1))},
            **{"top_p": rng.choice((0.0, 1.0)), "min_p": 0.0},
            **{"length_penalty": rng.randrange(-8, 9) / 4, "early_stopping": rng.random() < 0.5},
            "beam_search_diversity_rate": rng.randrange(9) / 4,
        }
    return {
        **{"temperature": rng.choice((0.0, 0.75, 1.0, 1.0, 2.5)), "top_k": rng.choice((0, 0, 1, 5, 40))},
        **{"top_p": rng.choice((0.0, 0.5, 0.875, 1.0)), "min_p": rng.choice((0.0, 0.03125))},
        **{"length_penalty": rng.choice((0.0, 1.0)), "early_stopping": False},
        "top_n_sigma": rng.choice((0.5, 1.5, 3.0)),
        "beam_search_diversity_rate": 0.0,
    }


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 390) for _ in range(count)]


def _tensor(name: str, values: list[Any]) -> Any:
    """A tensor with one row for each value."""
    rows = [value if isinstance(value, list) else [value] for value in values]
    rows = [[item.encode() if isinstance(item, str) else item for item in row] for row in rows]
    return np.array(rows, dtype=KINDS[name])
