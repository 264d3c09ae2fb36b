"""Random mixes: an engine's settings, and requests of all doors with fields from the one table of fields."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from helpers.grammars import VOCAB_SIZE
from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import FIELD, FIELDS, fields_at

MAX_MODEL_LEN = 96
# Rounds of the engine's loop at most, and how long each takes by its clock.
MAX_TICKS, TICK_S = 20_000, 0.02
Fields = dict[str, Any]

_WORDS = (
    "The quick",
    " brown fox",
    " jumps over",
    "你好，",
    "世界",
    "👍🏽",
    " stop",
    "\n",
    " é",
    "12 o'clock",
)
_STRINGS = ("e", "qu", " the", "。", "o'", "stop", "\ufffd")
_GUIDES = (
    ("json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'),
    ("regex", "[a-z ]{1,40}"),
    ("regex", "(qu|br){2,6}ick"),
    ("ebnf_grammar", 'root ::= [a-m]+ "."'),
)
_STRUCTURES: tuple[Fields, ...] = (
    {"json": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 3}},
    {"json_object": True},
    {"regex": "[a-f]{3}-[0-9]{2,4}"},
    {"choice": ["yes", "no", "not at all", "é"]},
)
# Without these there would be little to compare, so they are drawn more often.
_OFTEN = {
    **dict.fromkeys(("temperature", "stream", "exclude_input_in_output", "cache_salt"), 0.6),
    **dict.fromkeys(("return_finish_reason", "return_num_output_tokens", "stop_words", "top_k"), 0.5),
    **dict.fromkeys(("return_context_logits", "return_generation_logits", "ignore_eos"), 0.1),
    "num_draft_tokens": 0.3,
}
_SHARE, _SHARE_NOT_SERVED = 0.12, 0.002
_SHARE_KILLED = 0.25
_RANGES = ("retention_token_range_starts", "retention_token_range_ends", "retention_token_range_priorities")
# Fields that need others.
_NEEDS = {
    "top_p_decay": ("top_p",),
    "top_p_min": ("top_p", "top_p_decay"),
    "top_p_reset_ids": ("top_p", "top_p_decay"),
    "embedding_bias_words": ("embedding_bias_weights",),
    "embedding_bias_weights": ("embedding_bias_words",),
    "logit_bias_ids": ("logit_bias_values",),
    "logit_bias_values": ("logit_bias_ids",),
    **dict.fromkeys((*_RANGES, "retention_token_range_durations_ms"), _RANGES),
}
_GUIDE = ("guided_decoding_guide_type", "guided_decoding_guide")
_GRAMMARS = (_GUIDE, ("structured_outputs",), ("guided_decoding",))
_NOT_WITH_BEAMS = (
    "draft_input_ids",
    "stop_words_list",
    "stream",
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
)


class Door(enum.Enum):
    """A way into the engine; the values are the frontends whose fields its requests have."""

    LLM = (Frontend.LLM,)
    ENSEMBLE = (Frontend.ENSEMBLE,)
    TEXT = (Frontend.TEXT,)
    VLLM = (Frontend.VLLM, Frontend.SAMPLING_PARAMETERS)
    COMPLETIONS = (Frontend.OPENAI, "completions")
    CHAT = (Frontend.OPENAI, "chat")

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_openai(self) -> bool:
        return Frontend.OPENAI in self.value

    def fields(self) -> dict[str, Field]:
        """The fields that its requests may have, by the names of `FIELD`."""
        found = [fields_at(each) for each in self.value if isinstance(each, Frontend)]
        known = {field.name: field for each in reversed(found) for field in each.values()}
        if "logit_bias_ids" in known:
            # Some doors have one key for both.
            known["logit_bias_values"] = FIELD["logit_bias_values"]
        return known


class Ending(enum.Enum):
    """How a client ends its request early."""

    LEAVES = "leaves"
    STOPS = "stops"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Asked:
    """A request of a mix.

    Attributes:
        tick: when it comes, in rounds of the engine's loop.
        door: where it comes.
        rows: the fields of each row, by the names of `FIELD`; all rows have the same fields.
        as_parameters: whether fields that may be parameters are sent as such.
        ending: how its client ends it early; None: it does not.
        ends_after: how many rounds after it came.
        timeout_us: its deadline; 0 = none.
    """

    tick: int
    door: Door
    rows: tuple[Fields, ...]
    as_parameters: bool = False
    ending: Ending | None = None
    ends_after: int = 0
    timeout_us: int = 0

    @property
    def may_be_late(self) -> bool:
        """Whether its deadline may pass while the mix runs."""
        return 0 < self.timeout_us < 1e6 * MAX_TICKS * TICK_S

    @property
    def may_end_early(self) -> bool:
        return self.ending is not None or self.may_be_late


@dataclass(frozen=True)
class Settings:
    """An engine's settings.

    Attributes:
        model: "LlamaForCausalLM", or "Gemma3ForCausalLM", most of whose layers have windows.
        drafter: "none", "ngram", "suffix", "self" or "draft_model".
        kv_cache_dtype: "auto", or "int8": keys and values are codes with scales.
        ack_ticks: how many rounds the detokenizer takes to acknowledge a chunk.
    """

    model: str = "LlamaForCausalLM"
    num_blocks: int = 64
    max_num_seqs: int = 8
    budget: int = 64
    drafter: str = "none"
    num_speculative_tokens: int = 4
    is_cached: bool = False
    policy: str = "priority"
    ack_ticks: int = 0
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Kill:
    """The engine is lost, as by SIGKILL.

    Attributes:
        tick: in which round.
        num_sent: how many messages of the round it still sends.
        unnoticed_ticks: how many rounds its clients do not know of it.
        away_ticks: how many rounds there is no engine then.
    """

    tick: int = 0
    num_sent: int = 0
    unnoticed_ticks: int = 0
    away_ticks: int = 0


@dataclass(frozen=True)
class Mix:
    """What one engine gets, and the engine that follows when it is killed."""

    settings: Settings
    requests: tuple[Asked, ...]
    kill: Kill | None = None


def drawn_mix(seed: int) -> Mix:
    """Draw a mix; the same seed gives the same mix."""
    rng = random.Random(seed)
    max_num_seqs = rng.choice((1, 2, 4, 8))
    settings = Settings(
        model=rng.choice(("LlamaForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM")),
        # A sequence of the maximum length has six blocks.
        num_blocks=rng.choice((6, 6, 7, 9, 12, 40)),
        max_num_seqs=max_num_seqs,
        budget=max(max_num_seqs, rng.choice((8, 17, 64, 256))),
        drafter=rng.choice(("none", "ngram", "suffix", "suffix", "self", "draft_model")),
        num_speculative_tokens=rng.choice((1, 4, 16)),
        is_cached=rng.random() < 0.75,
        policy=rng.choice(("priority", "fcfs", "shortest_prompt")),
        ack_ticks=rng.choice((0, 1, 5)),
    )
    beginnings = [_text(rng, 12) for _ in range(2)]
    requests = [_asked(rng, beginnings) for _ in range(rng.randint(2, 9))]
    kill = _kill(rng)
    # Drawn last, so that a seed gives the requests that it gave before.
    settings = replace(settings, kv_cache_dtype=rng.choice(("auto", "int8")))
    return Mix(settings, tuple(requests), kill)


def _kill(rng: random.Random) -> Kill | None:
    if rng.random() >= _SHARE_KILLED:
        return None
    return Kill(
        tick=rng.choice((0, 1, 2, 3, 4, 6, 9, 13)),
        num_sent=rng.choice((0, 0, 1, 2, 3)),
        unnoticed_ticks=rng.choice((0, 0, 1, 3)),
        away_ticks=rng.choice((0, 1, 4)),
    )


def _asked(rng: random.Random, beginnings: list[str]) -> Asked:
    door = rng.choice(list(Door))
    ending = rng.choice((Ending.LEAVES, Ending.STOPS)) if rng.random() < 0.3 else None
    num_rows = rng.choice((1, 1, 1, 1, 2, 3)) if door in (Door.LLM, Door.ENSEMBLE, Door.TEXT) else 1
    return Asked(
        tick=rng.choice((0, 0, 1, 2, 5, 12)),
        door=door,
        rows=tuple(_rows(rng, door, num_rows, beginnings)),
        as_parameters=rng.random() < 0.3,
        ending=ending,
        ends_after=rng.choice((0, 1, 2, 3, 6, 15)) if ending else 0,
        timeout_us=rng.choice((1, 30_000, 200_000, 600_000_000)) if rng.random() < 0.25 else 0,
    )


def _rows(rng: random.Random, door: Door, num_rows: int, beginnings: list[str]) -> list[Fields]:
    known = door.fields()
    has_beams = "beam_width" in known and rng.random() < 0.2
    chosen = _chosen(rng, known, has_beams)
    if has_beams:
        common = {"beam_width": rng.randint(2, 4), "num_return_sequences": 1}
        chosen |= {"beam_width"}
    else:
        common = {"beam_width": 1, "num_return_sequences": rng.randint(1, 3)}
    common |= {name: _value(rng, known[name]) for name in sorted(chosen) if known[name].per_request} | common
    num_items = rng.randint(1, 3)
    has_messages = door is Door.CHAT or (door is not Door.COMPLETIONS and rng.random() < 0.2)
    rows = [
        _row(rng, door, chosen, common, num_items, has_beams, _prompt(rng, door, has_messages, beginnings))
        for _ in range(num_rows)
    ]
    _make_sendable(door, rows)
    if rng.random() < 0.05:
        _spoil(rng, rows[0], known)
    return rows


def _chosen(rng: random.Random, known: Mapping[str, Field], has_beams: bool) -> set[str]:
    shares = {
        name: _OFTEN.get(name, _SHARE) if field.served else _SHARE_NOT_SERVED * (field.dims == (1,))
        for name, field in known.items()
    }
    chosen = {name for name in known if rng.random() < shares[name]}
    chosen -= {name for name in known if known[name].sets in ("prompt", "stop")}
    chosen -= {"text_context", "sampling_parameters", "Streaming", "accumulate_tokens", "best_of"}
    chosen |= {"max_tokens"} & known.keys()
    for each in _GRAMMARS:
        chosen.difference_update(each)
    grammars = [each for each in _GRAMMARS if known.keys() >= set(each)]
    if grammars and not has_beams and rng.random() < 0.15:
        chosen.update(rng.choice(grammars))
    for name in list(chosen):
        chosen.update(_NEEDS.get(name, ()))
    # Without a seed the tokens are anybody's guess.
    chosen |= {"seed"} & known.keys()
    if has_beams:
        chosen.difference_update(_NOT_WITH_BEAMS)
        chosen -= {name for name in chosen if known[name].with_beams == ()}
    return chosen


def _row(
    rng: random.Random,
    door: Door,
    chosen: set[str],
    common: Fields,
    num_items: int,
    has_beams: bool,
    row: Fields,
) -> Fields:
    """Draw the other fields of a row that has a prompt."""
    known = door.fields()
    for name in sorted(chosen):
        field = known[name]
        allowed = field.with_beams if has_beams else field.without_beams
        if name in common:
            row[name] = common[name]
        elif allowed is not None and field.is_scalar:
            row[name] = rng.choice([*allowed, *([field.off] if field.off is not None else [])])
        else:
            row[name] = _value(rng, field, num_items)
    _agree(rng, row)
    return row


def _agree(rng: random.Random, row: Fields) -> None:
    """Let fields that depend on each other have values that go together."""
    if "guided_decoding_guide_type" in row:
        row["guided_decoding_guide_type"], row["guided_decoding_guide"] = rng.choice(_GUIDES)
    for name in ("min_tokens", "min_length"):
        if name in row:
            row[name] = min(row[name], row.get("max_tokens", 16))
    for name in row:
        if FIELD[name].alias_of in row:
            row[name] = row[FIELD[name].alias_of]
    if "retention_token_range_starts" in row:
        row["retention_token_range_ends"] = [each + 7 for each in row["retention_token_range_starts"]]
    if "top_p_decay" in row:
        row["top_p"] = 0.875


def _prompt(rng: random.Random, door: Door, has_messages: bool, beginnings: list[str]) -> Fields:
    text = rng.choice(beginnings)[: rng.choice((0, 30, 50))] + _text(rng, rng.randint(1, 4))
    if door is Door.LLM:
        return {"input_ids": [ord(char) % 300 + 4 for char in text][: MAX_MODEL_LEN - 32]}
    if has_messages:
        return {"messages": [{"role": "user", "content": text}]}
    return {"text_input": text}


def _text(rng: random.Random, num_words: int) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(num_words))


def _make_sendable(door: Door, rows: list[Fields]) -> None:
    """Remove what the vLLM backend's shape refuses in combination."""
    for row in rows:
        if door is Door.VLLM and row.get("stream"):
            row.pop("exclude_input_in_output", None)
            row.pop("num_return_sequences", None)
        if door is Door.VLLM and "num_log_probs" in row:
            row["return_logprobs"] = True


def _spoil(rng: random.Random, row: Fields, known: Mapping[str, Field]) -> None:
    """Give a number a value that is not allowed."""
    numbers = [name for name in row if name in known and known[name].kind in (Kind.INT32, Kind.FP32)]
    name = rng.choice(sorted(numbers) or ["seed"])
    bad = known[name].minimum - 1 if known[name].minimum > -math.inf else known[name].maximum + 1
    if name in row and known[name].is_scalar and math.isfinite(bad) and -(2**31) <= bad < 2**31:
        row[name] = bad


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCAB_SIZE) for _ in range(count)]


_VALUES: Mapping[str, Callable[[random.Random, int], Any]] = {
    "max_tokens": lambda rng, _: rng.randint(1, 30),
    "min_tokens": lambda rng, _: rng.randint(0, 6),
    "min_length": lambda rng, _: rng.randint(0, 6),
    "temperature": lambda rng, _: rng.choice((0.0, 0.75, 1.0, 2.5)),
    "top_k": lambda rng, _: rng.choice((0, 1, 5, 40)),
    "top_p": lambda rng, _: rng.choice((0.5, 0.875, 1.0)),
    "top_p_decay": lambda rng, _: rng.choice((0.5, 1.0)),
    "top_n_sigma": lambda rng, _: rng.choice((0.5, 3.0)),
    "seed": lambda rng, _: rng.getrandbits(rng.choice((8, 62))),
    "random_seed": lambda rng, _: rng.getrandbits(8),
    "repetition_penalty": lambda rng, _: rng.randrange(13, 25) / 16,
    "num_draft_tokens": lambda rng, _: rng.choice((0, 1, 3, 16)),
    "draft_input_ids": lambda rng, _: _ids(rng, 3),
    "allowed_token_ids": lambda rng, _: list(range(rng.randrange(4, 40), 300, rng.choice((1, 3)))),
    "embedding_bias": lambda rng, _: [rng.choice((0.0, 0.0, 0.0, 2.0, -2.0)) for _ in range(VOCAB_SIZE)],
    "bad_words_list": lambda rng, num: [_ids(rng, rng.randint(1, 2)) for _ in range(num)],
    "stop_words_list": lambda rng, num: [_ids(rng, rng.randint(1, 2)) for _ in range(num)],
    "cache_salt": lambda rng, _: rng.choice(("", "", "a", "b")),
    "num_log_probs": lambda rng, _: rng.choice((0, 1, 5)),
    "num_prompt_log_probs": lambda rng, _: rng.choice((0, 2)),
    "priority": lambda rng, _: rng.choice((0, 0, -3, 3)),
    "structured_outputs": lambda rng, _: rng.choice(_STRUCTURES),
    "guided_decoding": lambda rng, _: rng.choice(_STRUCTURES),
    **{
        name: lambda rng, _: rng.randrange(-1, VOCAB_SIZE) for name in ("end_id", "pad_id", "top_p_reset_ids")
    },
}


def _value(rng: random.Random, field: Field, num_items: int = 1) -> Any:
    """Draw a value that the field allows."""
    if field.name in _VALUES:
        return _VALUES[field.name](rng, num_items)
    if field.kind is Kind.STRING:
        return rng.choice(_STRINGS) if field.is_scalar else [rng.choice(_STRINGS) for _ in range(num_items)]
    if field.kind is Kind.BOOL:
        return rng.random() < 0.6
    if field.is_scalar or field.kind is Kind.FP32 or field.minimum > -math.inf:
        values = [_number(rng, field) for _ in range(1 if field.is_scalar else num_items)]
        return values[0] if field.is_scalar else values
    return _ids(rng, num_items)


def _number(rng: random.Random, field: Field) -> int | float:
    least, most = max(field.minimum, -2.0), min(field.maximum, max(field.minimum, -2.0) + 6)
    if field.kind is Kind.FP32:
        # Fractions that every format holds exactly.
        return round(rng.uniform(least, most) * 8) / 8 or (0.0 if field.minimum <= 0 else 0.125)
    return rng.randint(int(least), int(most))


def served_fields() -> dict[Door, set[str]]:
    """For each door the fields that mixes have to cover."""
    left_out = {"stop", "text_context", "sampling_parameters", "input_lengths", "best_of"}
    return {door: {name for name, field in door.fields().items() if field.served} - left_out for door in Door}


def labels(mix: Mix) -> set[str]:
    """What a mix covers: each field at each door, and more."""
    found = {f"drafter {mix.settings.drafter}", f"KV cache {mix.settings.kv_cache_dtype}"}
    for asked in mix.requests:
        found |= {f"{asked.door.name} {name}" for row in asked.rows for name in row}
        found |= {f"{asked.door.name} {asked.ending.name}"} if asked.ending else set()
    return found


assert {field.name for field in FIELDS}.issuperset(_VALUES), "a field has another name now"
