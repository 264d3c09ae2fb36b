"""Measures what the largest JSON schemas cost other requests.

    python -m perf.engine.large_schema [--properties 450 --turns 4]

A stream without a grammar runs all the time. Beside it, in one kind of turn, a request for sixteen texts
without a grammar runs; in the other kind its texts follow a schema, new in each turn, of one object with so
many properties that may be left out, which is what costs a step most. The times between two tokens of the
stream are compared between neighbouring turns, from the moment when the texts were asked for to the last
one's end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest, GrammarKind, GrammarSpec, SamplingParams
from naiad.tokenization import Tokenizer

_PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_NUM_TEXTS = 16
_NUM_TOKENS = 24
_STREAM_TOKENS = 1024
_END_S = 300.0

Row = dict[str, object]


def main() -> int:
    """Measure, print and write the figures."""
    args = _parse()
    model_dir = resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="naiad-schema-") as folder:
        bench = _Bench(model_dir, Path(folder) / "llm.engine")
        try:
            bench.turn(_schema(args.properties, args.turns))  # warms up
            pairs = [(bench.turn(None), bench.turn(_schema(args.properties, n))) for n in range(args.turns)]
        finally:
            bench.close()
    rows: list[Row] = [_row(*each) for each in pairs]
    medians = [percentile(bound.gaps, 50) / percentile(free.gaps, 50) for free, bound in pairs]
    longest = [max(bound.gaps) / max(free.gaps) for free, bound in pairs]
    summary: Row = {
        "p50 ratio": round(statistics.median(medians), 2),
        "longest ratio": round(statistics.median(longest), 2),
    }
    print_rows(rows)
    print_rows([summary])
    print("written:", write_report("large-schema", vars(args), [*rows, summary]))
    return 0


class _Turn(NamedTuple):
    """The stream's gaps in seconds while texts ran beside it, and their errors."""

    gaps: list[float]
    errors: list[str]


class _Bench:
    """An engine process, and a stream that never ends."""

    def __init__(self, model_dir: Path, socket_path: Path) -> None:
        self._tokenizer = Tokenizer.from_directory(model_dir)
        self._changed = threading.Condition()
        self._times: list[float] = []
        self._left: set[int] = set()
        self._errors: list[str] = []
        self._end_s = 0.0
        self._next_id = 1
        config = EngineConfig(model_dir=str(model_dir), drafter="none")
        self._client = EngineClient(config, socket_path, self._on_outputs, lambda: None)
        self._client.start()

    def close(self) -> None:
        """End the engine."""
        self._client.close(timeout_s=0)

    def turn(self, schema: str | None) -> _Turn:
        """Run sixteen texts beside the stream, under a schema if there is one."""
        self._submit("Tell a story.", SamplingParams(max_tokens=_STREAM_TOKENS), 1, is_stream=True)
        grammar = None if schema is None else GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=schema)
        time.sleep(0.5)
        begin_s = time.perf_counter()
        self._submit("Describe it.", SamplingParams(max_tokens=_NUM_TOKENS, grammar=grammar), _NUM_TEXTS)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left, _END_S):
                raise SystemExit(f"the texts did not end within {_END_S:g} s")
            gaps = gaps_between(self._times, begin_s, self._end_s)
            errors = self._errors
        self._client.abort([self._stream_id])
        return _Turn(gaps, errors)

    def _submit(self, text: str, params: SamplingParams, count: int, is_stream: bool = False) -> None:
        prompt = self._tokenizer.encode(_PROMPT.format(text), False)
        with self._changed:
            first, *others = ids = range(self._next_id, self._next_id + count)
            self._next_id += count
            if is_stream:
                self._stream_id, self._times, self._errors = first, [], []
            else:
                self._left = set(ids)
        request = EngineRequest(
            sequence_id=first, prompt_token_ids=prompt, params=params, sibling_ids=tuple(others)
        )
        self._client.submit([request])

    def _on_outputs(self, outputs: list[RequestOutput], _: EngineStats | None) -> None:
        with self._changed:
            for output in outputs:
                if output.sequence_id == self._stream_id:
                    self._times.append(time.perf_counter())
                elif output.finish_reason is not None:
                    self._left.discard(output.sequence_id)
                    self._end_s = time.perf_counter()
                    self._errors += [output.error_message] if output.error_message else []
            self._changed.notify_all()


def gaps_between(times: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """The gaps between neighbouring times that have a part between two moments."""
    pairs = pairwise(times)
    return [after - before for before, after in pairs if after > begin_s and before < end_s]


def _row(free: _Turn, bound: _Turn) -> Row:
    return {
        "free, p50 ms": round(1e3 * percentile(free.gaps, 50), 2),
        "longest ms": round(1e3 * max(free.gaps), 1),
        "schema, p50 ms": round(1e3 * percentile(bound.gaps, 50), 2),
        "schema, longest ms": round(1e3 * max(bound.gaps), 1),
        "refused": len(bound.errors),
    }


def _schema(num_properties: int, number: int) -> str:
    properties = {f"p{index}": {"type": "integer"} for index in range(num_properties)}
    return json.dumps({"type": "object", "title": str(number), "properties": properties, "minProperties": 0})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--properties", type=at_least(1), default=450, metavar="N", help="of the object")
    parser.add_argument("--turns", type=at_least(1), default=4, metavar="N", help="of each kind, A B A B")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
