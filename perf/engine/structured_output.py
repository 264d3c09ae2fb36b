"""Measures what grammars cost and gain in the engine, and whether texts under JSON schemas are valid.

    python -m perf.engine.structured_output

Steps with and without JSON schemas take turns in one engine: the schemas allow texts without an end, each row
has another one, and nothing is drafted. Then objects of a fixed shape are written, whose forced tokens
are drafted, beside free text. Last, schemas are drawn at random, and the default model writes
a text for each, greedily and at temperature 1; every text that ends by itself must be valid, or no figure
is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from itertools import chain
from typing import Any

import jsonschema
from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report

from naiad.cli.bench.throughput import load_engine
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.sequence import EngineRequest, FinishReason, GrammarKind, GrammarSpec, SamplingParams
from naiad.tokenization import Tokenizer
from naiad.tokenization.text_decoder import decode

_PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TASK = "Describe person number {} as JSON."
_WARM_UP_STEPS = 8
_MOST_STEPS = 400
_MOST_TOKENS = 512

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write the figures."""
    args = _parse()
    model_dir = resolve_model(args.model)
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=args.dtype,
        max_num_seqs=32,
        enable_prefix_caching=False,
        drafter="none",
    )
    engine, dtype = load_engine(config)
    tokenizer = Tokenizer.from_directory(model_dir)
    bench = _Bench(engine, tokenizer)
    steps = [bench.cost_of_steps(batch, args.turns, args.steps) for batch in (1, 8, 32)]
    print("median milliseconds of a decode step")
    print_rows(steps)
    fixed = bench.gain_of_forced_tokens(args.turns)
    print("new tokens per second of one sequence")
    print_rows([fixed])
    texts = [bench.validity(args.schemas, temperature) for temperature in (0.0, 1.0)]
    print(f"texts of {args.schemas} random schemas, at most {_MOST_TOKENS} tokens")
    print_rows(texts)
    results = [*steps, fixed, *texts]
    print("written:", write_report("structured-output", vars(args) | {"dtype": dtype}, results))
    return 0


class _Bench:
    """One engine, in which requests with and without grammars take turns."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._next_id = 1

    def cost_of_steps(self, batch: int, num_turns: int, num_steps: int) -> Row:
        """Return the time of decode steps without and with a schema in each row."""
        free_turns, bound_turns = [], []
        for _ in range(num_turns):
            free_turns.append(self._steps_s(batch, num_steps, False))
            bound_turns.append(self._steps_s(batch, num_steps, True))
        free, bound = ([statistics.median(each) for each in turns] for turns in (free_turns, bound_turns))
        ratios = [with_it / without for with_it, without in zip(bound, free, strict=True)]
        return {
            "batch": batch,
            "free": round(1e3 * statistics.median(free), 3),
            "with schemas": round(1e3 * statistics.median(bound), 3),
            "free, p99": round(1e3 * percentile([*chain(*free_turns)], 99), 3),
            "with, p99": round(1e3 * percentile([*chain(*bound_turns)], 99), 3),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }

    def gain_of_forced_tokens(self, num_turns: int) -> Row:
        """Return the speed of free text and of an object of a fixed shape."""
        names = ["identification_number", "family_name_at_birth", "country_of_residence", "is_still_employed"]
        kinds: list[Row] = [{"type": "integer"}, {"type": "string", "maxLength": 12}] * 2
        schema = {
            "type": "object",
            "properties": dict(zip(names, kinds, strict=True)),
            "required": names,
            "additionalProperties": False,
        }
        free, bound = [], []
        for _ in range(num_turns):
            free.append(self._tokens_per_s(SamplingParams(max_tokens=64)))
            params = SamplingParams(max_tokens=128, grammar=_spec(schema), stop_token_ids=self._end_ids)
            bound.append(self._tokens_per_s(params))
        ratios = [with_it / without for with_it, without in zip(bound, free, strict=True)]
        return {
            "free": round(statistics.median(free), 1),
            "fixed shape": round(statistics.median(bound), 1),
            "ratio": round(statistics.median(ratios), 2),
        }

    def validity(self, num_schemas: int, temperature: float) -> Row:
        """Write a text for each of some random schemas; return how many ended and were valid.

        Raises:
            SystemExit: a text that ended by itself is not valid.
        """
        rng = random.Random(7)
        schemas: dict[int, Row] = {}
        for _ in range(num_schemas):
            schema = _random_object(rng, 2)
            params = SamplingParams(
                max_tokens=_MOST_TOKENS,
                temperature=temperature,
                seed=rng.getrandbits(32),
                grammar=_spec(schema),
                stop_token_ids=self._end_ids,
            )
            schemas[self._add(params)] = schema
        ids: dict[int, list[int]] = {each: [] for each in schemas}
        num_stopped = 0
        while self._engine.has_work:
            for output in self._engine.step():
                ids[output.sequence_id] += output.token_ids
                if output.finish_reason is FinishReason.STOP:
                    num_stopped += 1
                    self._check(ids[output.sequence_id], schemas[output.sequence_id])
                elif output.finish_reason is FinishReason.ERROR:
                    raise SystemExit(f"a text failed: {output.error_message}")
        return {"temperature": temperature, "schemas": num_schemas, "ended and valid": num_stopped}

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return tuple(self._engine.model_config.eos_token_ids)

    def _check(self, token_ids: list[int], schema: Row) -> None:
        text = decode(self._tokenizer.table, token_ids, skip_special_tokens=True)
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise SystemExit(f"not valid under {schema}: {text!r}: {error}") from error

    def _add(self, params: SamplingParams) -> int:
        sequence_id, self._next_id = self._next_id, self._next_id + 1
        prompt = self._tokenizer.encode(_PROMPT.format(_TASK.format(sequence_id)), False)
        self._engine.add_request(
            EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params)
        )
        return sequence_id

    def _steps_s(self, batch: int, num_steps: int, has_schemas: bool) -> list[float]:
        """Return the seconds of each of some steps that decode one token of each row."""
        sequence_ids = [
            self._add(
                SamplingParams(
                    max_tokens=_MOST_STEPS,
                    num_draft_tokens=0,
                    grammar=_spec(_endless(place)) if has_schemas else None,
                    stop_token_ids=self._end_ids if has_schemas else (),
                )
            )
            for place in range(batch)
        ]
        waiting = set(sequence_ids)
        while waiting:
            waiting -= {output.sequence_id for output in self._engine.step() if output.token_ids}
        for _ in range(_WARM_UP_STEPS):
            self._engine.step()
        times = []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            outputs = self._engine.step()
            times.append(time.perf_counter() - start_s)
            if sum(len(output.token_ids) for output in outputs) != batch:
                raise SystemExit("a step made another number of tokens than it has rows")
        for sequence_id in sequence_ids:
            self._engine.abort(sequence_id)
        while self._engine.has_work:
            self._engine.step()
        return times

    def _tokens_per_s(self, params: SamplingParams) -> float:
        """Return the new tokens per second after the first one."""
        self._add(params)
        num_tokens, start_s = 0, 0.0
        while self._engine.has_work:
            for output in self._engine.step():
                if not start_s and output.token_ids:
                    start_s = time.perf_counter()
                    continue
                num_tokens += len(output.token_ids)
        return num_tokens / (time.perf_counter() - start_s)


def _spec(schema: Row) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))


def _endless(place: int) -> Row:
    """A list that never ends; its entries have a name of this row's own."""
    properties = {
        f"name_{place}": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "height": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "active": {"type": "boolean"},
    }
    entry = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "array", "items": entry | {"additionalProperties": False}, "minItems": 1000}


def _random_object(rng: random.Random, depth: int) -> Row:
    names = rng.sample(["name", "age", "city", "email", "score", "items", "notes", "owner", "kind"], 4)
    properties = {name: _random_value(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _random_value(rng: random.Random, depth: int) -> Row:
    kinds: list[Row] = [
        {"type": "string", "maxLength": 24},
        {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        {"type": "integer", "minimum": 0, "maximum": 120},
        {"type": "number", "minimum": -5, "maximum": 5},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue", None, 3]},
        {"type": ["string", "null"], "maxLength": 12},
        {"type": "string", "format": "date"},
    ]
    if depth and rng.random() < 0.3:
        inner = _random_value(rng, 0)
        return rng.choice([_random_object(rng, 0), {"type": "array", "items": inner, "maxItems": 3}])
    return rng.choice(kinds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="of each, A B A B")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of a turn")
    parser.add_argument("--schemas", type=int, default=200, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
