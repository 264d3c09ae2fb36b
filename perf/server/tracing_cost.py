"""Measures what tracing every request costs, in the processor time of a streamed token.

    python -m perf.server.tracing_cost

Three servers whose engine only counts stream the same requests in turns: one without tracing, one that sends
the spans of every request to a collector, and one whose collector is not there. Each turn goes through every
model and the OpenAI API, and begins with another server. Processor time is that of a server with all its
processes; a ratio is the median of those of the turns, with its standard error. What the calls that trace a
request take on their own, and the encoding of its spans, is measured first, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perf.common.report import print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.fast_repository import write_fast_repository
from perf.server.load import CountedTokens, llm_generate, openai_generate, text_generate
from perf.server.processor_time import OPENAI, processor_seconds
from perf.server.serve_process import Served, naiad_serve
from perf.server.span_collector import SpanCollector, span_collector
from transformers import AutoTokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import Work
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.frontend.request import GenerateRequest, RequestedOutputs, RequestRow
from naiad.outputs import RequestOutput
from naiad.sequence import FinishReason, SamplingParams
from naiad.tracing.request_trace import COMPLETION, Tracer
from naiad.tracing.span import Span, encode_spans, process_attributes
from naiad.tracing.trace_context import NO_TRACE

OFF, TRACED, DEAD = "off", "traced", "no collector"
# Nobody listens there.
_NOBODY = "http://127.0.0.1:9"
_MODELS = ("text", "ensemble", "llm", OPENAI)
# A request has a span, and one for each of five phases.
_SPANS_PER_REQUEST = 6
_OWN_REPEATS, _OWN_REQUESTS = 20, 64

# Prompts and a number of tokens → what was made of them.
Door = Callable[[Any, int], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    args = _parse(argv)
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    work = Work(args.concurrency, 16, args.tokens)
    make_prompts = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    with span_collector() as collector, _servers(model_dir, args.tokens_per_s, collector) as servers:
        counted = {name: CountedTokens(server) for name, server in servers.items()}
        doors = {name: _doors(server, decode, counted[name]) for name, server in servers.items()}
        for name in servers:
            for model in args.through:
                doors[name][model](make_prompts("warm up"), 8)
        turns = [
            {
                (model, name): _cost(servers[name], doors[name][model], make_prompts(f"{model} {turn}"), args)
                for model in args.through
                for name in _rotated(list(servers), turn)
            }
            for turn in range(args.turns)
        ]
        for each in counted.values():
            each.check()
        _check(collector, args)
    own_us = _own_us(args.tokens)
    rows = [_row(model, turns) | {"calls alone": round(own_us, 2)} for model in args.through]
    print("microseconds of processor time for each token")
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name}
    print("written:", write_report("tracing-cost", settings, rows))
    return 0


@contextlib.contextmanager
def _servers(model_dir: Path, tokens_per_s: float, collector: SpanCollector) -> Iterator[dict[str, Served]]:
    options = {
        OFF: (),
        TRACED: ("--otlp-endpoint", collector.url),
        DEAD: ("--otlp-endpoint", _NOBODY),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="naiad-perf-")))
        repository = folder / "repository"
        environment = write_fast_repository(repository, tokens_per_s)
        common = ("--model", str(model_dir), "--model-repository", str(repository))
        yield {
            name: stack.enter_context(naiad_serve((*common, *own), environment))
            for name, own in options.items()
        }


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def _doors(server: Served, decode: Callable[[list[int]], str], counted: CountedTokens) -> dict[str, Door]:
    return {
        "text": counted.of(text_generate(server, "text", decode)),
        "ensemble": counted.of(text_generate(server, "ensemble", decode)),
        "llm": counted.of(llm_generate(server)),
        OPENAI: counted.of(openai_generate(server, decode)),
    }


def _cost(server: Served, ask: Door, prompts: Any, args: argparse.Namespace) -> float:
    """Microseconds of the server's processor time for each token of these requests."""
    before = sum(processor_seconds(server.pid).values())
    for _ in range(args.rounds):
        ask(prompts, args.tokens)
    spent = sum(processor_seconds(server.pid).values()) - before
    num_tokens: int = args.rounds * args.tokens * args.concurrency
    if spent == 0.0:
        # The system's clock of processor time ticks every 10 ms.
        raise SystemExit(
            f"{num_tokens} tokens take too little processor time: give more --rounds or --tokens"
        )
    return 1e6 * spent / num_tokens


def _own_us(num_tokens: int) -> float:
    """Microseconds of processor time for each token of an answer that the calls take which trace it."""
    spans: list[Span] = []
    exporter: Any = SimpleNamespace(add=spans.extend)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=7)
    row = RequestRow(prompt_token_ids=[1] * 16, params=params, text=None, cache_salt="")
    request = GenerateRequest(
        request_id="",
        rows=[row],
        timeout_s=None,
        streaming=True,
        exclude_input=True,
        outputs=RequestedOutputs(),
    )
    outputs = [RequestOutput(1, [7]) for _ in range(num_tokens - 1)]
    outputs.append(RequestOutput(1, [7], finish_reason=FinishReason.LENGTH))
    resource = process_attributes("naiad")
    best_s = math.inf
    for _ in range(_OWN_REPEATS):
        began_s = time.process_time()
        for _ in range(_OWN_REQUESTS):
            trace = Tracer(exporter).begin(NO_TRACE, time.monotonic())
            assert trace is not None
            trace.name(COMPLETION, "model", "cmpl-0123456789abcdef")
            trace.submit(request, "model")
            for output in outputs:
                trace.take(0, output)
            trace.end()
        encode_spans(resource, spans)
        best_s = min(best_s, time.process_time() - began_s)
        spans.clear()
    return 1e6 * best_s / _OWN_REQUESTS / num_tokens


def _check(collector: SpanCollector, args: argparse.Namespace, timeout_s: float = 60.0) -> None:
    """See that the spans of every request have come, those of warming up included.

    Raises:
        AssertionError: some have not.
    """
    num_requests = (1 + args.turns * args.rounds) * args.concurrency * len(args.through)
    expected = num_requests * _SPANS_PER_REQUEST

    def num_come() -> int:
        return sum(not each.is_tritons_own for each in collector.spans())

    with collector.changed:
        collector.changed.wait_for(lambda: num_come() >= expected, timeout_s)
    assert num_come() >= expected, f"{num_come()} spans came: expected {expected}"


def _row(model: str, turns: Sequence[Mapping[tuple[str, str], float]]) -> dict[str, Any]:
    def middle(name: str) -> float:
        return round(statistics.median(turn[model, name] for turn in turns), 1)

    def ratios(name: str) -> list[float]:
        return sorted(turn[model, name] / turn[model, OFF] for turn in turns)

    row: dict[str, Any] = {"through": model} | {name: middle(name) for name in (OFF, TRACED, DEAD)}
    for name in (TRACED, DEAD):
        found = ratios(name)
        row |= {f"{name}, ratio": round(statistics.median(found), 3)}
        row |= {f"{name}, error": round(_median_error(found), 3)}
        row |= {f"{name}, least and most": f"{found[0]:.3f}, {found[-1]:.3f}"}
    return row


def _median_error(values: Sequence[float]) -> float:
    """The standard error of a median of values that are spread normally."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return math.sqrt(math.pi / 2 / len(values)) * spread


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument(
        "--through", nargs="+", choices=_MODELS, default=list(_MODELS), help="models, and the OpenAI API"
    )
    parser.add_argument("--tokens-per-s", type=float, default=1600, metavar="N", help="of the engine")
    parser.add_argument("--concurrency", type=at_least(1), default=32, metavar="N")
    parser.add_argument("--tokens", type=at_least(1), default=64, metavar="N", help="of each answer")
    parser.add_argument("--rounds", type=at_least(1), default=2, metavar="N", help="of requests in a turn")
    parser.add_argument("--turns", type=at_least(1), default=10, metavar="N")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
