"""Measures what many different JSON schemas cost the engine's memory and other requests.

    python -m perf.engine.grammar_crowd [--schemas 10000]

Some streams without a grammar run all the time. Beside them requests arrive at a constant rate, each for
a few tokens. In one kind of turn each of them has a JSON schema of its own; in the other kind, the paired
control, all of them have the same one. The times between two tokens of the streams are compared between
neighbouring turns. The memory of the engine process and of those that compile for it is read after each
turn; what is kept of grammars is full long before the first tenth of the schemas has been sent.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, FinishReason, GrammarKind, GrammarSpec, SamplingParams
from naiad.tokenization import Tokenizer

_PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_STREAM_TOKENS = 1024
_CROWD_TOKENS = 4
_WORDS = ("name", "age", "city", "email", "score", "items", "notes", "owner", "kind", "price", "weight")
_MIB = 1 << 20
_END_S = 600.0

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write the figures."""
    args = _parse()
    model_dir = resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="naiad-crowd-") as folder:
        crowd = _Crowd(model_dir, args.dtype, Path(folder) / "llm.engine")
        try:
            rows = crowd.measure(args.schemas, args.turns, args.rate, args.streams)
        finally:
            crowd.close()
    print_rows(rows)
    summary = _summary(rows)
    print_rows([summary])
    print("written:", write_report("grammar-crowd", vars(args), [*rows, summary]))
    return 0


def _summary(rows: list[Row]) -> Row:
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    ratios = [alone["p99 ms"] and crowd["p99 ms"] / alone["p99 ms"] for alone, crowd in pairs]
    memory = [row["engine MiB"] for row in rows]
    helpers = [row["compilers MiB"] for row in rows]
    return {
        "schemas": sum(crowd["requests"] for _, crowd in pairs),
        "p99 ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "engine MiB, first pair": max(memory[:2]),
        "last pair": max(memory[-2:]),
        "compilers MiB, most": max(helpers),
    }


class _Crowd:
    """An engine process, streams that never end, and requests beside them."""

    def __init__(self, model_dir: Path, dtype: str, socket_path: Path) -> None:
        self._tokenizer = Tokenizer.from_directory(model_dir)
        self._changed = threading.Condition()
        self._last_s: dict[int, float] = {}
        self._gaps: list[float] = []
        self._ended: set[int] = set()
        self._crowd: set[int] = set()
        self._failure = ""
        self._next_id = 1
        config = EngineConfig(model_dir=str(model_dir), dtype=dtype, drafter="none")
        self._client = EngineClient(config, socket_path, self._on_outputs, self._on_lost)
        self._client.start()

    def close(self) -> None:
        """End the engine."""
        self._client.close(timeout_s=0)

    def measure(self, num_schemas: int, num_turns: int, rate: float, num_streams: int) -> list[Row]:
        """Return a row for each turn: first the control, then the schemas, and so on.

        Raises:
            SystemExit: a request failed.
        """
        rng = random.Random(11)
        shared = _schema(rng, -1)
        for number in range(num_streams):
            self._stream(number)
        # The tokenizer is loaded and the shared schema compiled before the first turn.
        self._turn([shared] * 4, rate)
        rows = []
        bounds = [num_schemas * turn // num_turns for turn in range(num_turns + 1)]
        for first, end in pairwise(bounds):
            rows.append({"turn": "one schema", **self._turn([shared] * (end - first), rate)})
            own = [_schema(rng, number) for number in range(first, end)]
            rows.append({"turn": "a schema each", **self._turn(own, rate)})
        return rows

    def _turn(self, schemas: list[str], rate: float) -> Row:
        with self._changed:
            self._gaps, self._ended, self._crowd = [], set(), set()
        start_s = time.monotonic()
        for number, schema in enumerate(schemas):
            time.sleep(max(0.0, start_s + number / rate - time.monotonic()))
            self._ask(schema)
        with self._changed:
            if not self._changed.wait_for(self._is_over, _END_S):
                raise SystemExit(f"the requests did not end within {_END_S:g} s")
            if self._failure:
                raise SystemExit(self._failure)
            gaps = list(self._gaps)
        engine, compilers = self._memory()
        return {
            "requests": len(schemas),
            "seconds": round(time.monotonic() - start_s, 1),
            "gaps": len(gaps),
            "p50 ms": round(1e3 * percentile(gaps, 50), 2),
            "p99 ms": round(1e3 * percentile(gaps, 99), 2),
            "engine MiB": engine,
            "compilers MiB": compilers,
        }

    def _is_over(self) -> bool:
        return bool(self._failure) or self._ended >= self._crowd

    def _memory(self) -> tuple[int, int]:
        """Resident MiB of the engine process, and of those that compile for it."""
        engine = psutil.Process(self._client.pid)
        children = sum(each.memory_info().rss for each in engine.children(recursive=True))
        return engine.memory_info().rss // _MIB, children // _MIB

    def _stream(self, number: int) -> None:
        prompt = self._tokenizer.encode(_PROMPT.format(f"Tell story number {number}."), False)
        sequence_id = self._new_id()
        self._last_s[sequence_id] = 0.0
        params = SamplingParams(max_tokens=_STREAM_TOKENS)
        self._client.submit([EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params)])

    def _ask(self, schema: str) -> None:
        prompt = self._tokenizer.encode(_PROMPT.format("Describe it as JSON."), False)
        spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=schema)
        ends = tuple(self._client.info.eos_token_ids)
        params = SamplingParams(max_tokens=_CROWD_TOKENS, grammar=spec, stop_token_ids=ends)
        sequence_id = self._new_id()
        with self._changed:
            self._crowd.add(sequence_id)
        self._client.submit([EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params)])

    def _new_id(self) -> int:
        with self._changed:
            sequence_id, self._next_id = self._next_id, self._next_id + 1
        return sequence_id

    def _on_outputs(self, outputs: list[RequestOutput], _: EngineStats | None) -> None:
        now_s = time.perf_counter()
        ended_streams = 0
        with self._changed:
            for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    self._failure = f"a request failed: {output.error_message}"
                if output.sequence_id in self._last_s:
                    ended_streams += self._take_token(output, now_s)
                elif output.finish_reason is not None:
                    self._ended.add(output.sequence_id)
            self._changed.notify_all()
        for number in range(ended_streams):
            self._stream(number)

    def _take_token(self, output: RequestOutput, now_s: float) -> bool:
        """Take notice of a stream's token; return whether the stream has ended."""
        last_s = self._last_s[output.sequence_id]
        if last_s:
            self._gaps.append(now_s - last_s)
        self._last_s[output.sequence_id] = now_s
        if output.finish_reason is None:
            return False
        del self._last_s[output.sequence_id]
        return True

    def _on_lost(self) -> None:
        with self._changed:
            self._failure = "the engine process was lost"
            self._changed.notify_all()


def _schema(rng: random.Random, number: int) -> str:
    """A schema of some hundred bytes that no other number has."""
    kinds: list[Row] = [
        {"type": "string", "maxLength": rng.randrange(8, 64)},
        {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 10_000)},
        {"type": "string", "pattern": f"^[A-Z][a-z]{{2,{rng.randrange(4, 20)}}}$"},
        {"type": "array", "items": {"type": "number"}, "maxItems": rng.randrange(2, 9)},
        {"enum": rng.sample(_WORDS, 4)},
        {"type": ["string", "null"], "format": "date"},
    ]
    names = [f"{name}_{number}" for name in rng.sample(_WORDS, 5)]
    properties = {name: rng.choice(kinds) for name in names}
    return json.dumps(
        {"type": "object", "properties": properties, "required": names[:3], "additionalProperties": False}
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--schemas", type=at_least(1), default=10_000, metavar="N", help="different ones")
    parser.add_argument("--turns", type=at_least(1), default=10, metavar="N", help="of each kind, A B A B")
    parser.add_argument("--rate", type=float, default=10.0, metavar="R", help="requests per second")
    parser.add_argument("--streams", type=at_least(1), default=4, metavar="N", help="that run all the time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
