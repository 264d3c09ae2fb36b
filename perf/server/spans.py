"""Traces a streamed request by every door of a real server, and compares its spans with what the client saw.

    python -m perf.server.spans

Each door takes requests in turns. A request's phases must add up to its whole span, or the run fails. By how
much the client waited longer than that is in the table, and not judged. The picture shows for each door the
request with the middle difference.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perf.common.report import plot_path, print_rows, write_report
from perf.server.serve_process import Served, naiad_serve
from perf.server.span_collector import Received, SpanCollector, span_collector

from naiad.cli.argument_types import at_least

NAME = "spans"
PHASES = ("read", "queue", "prefill", "decode", "send")
_PROMPT = "Write a short story about a river and the people who live beside it. "
_SERVED_NAME = "traced"
_PATIENCE_S = 30
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class Traced:
    """A request as its client and its spans saw it.

    Attributes:
        begin_ns, end_ns: when the client sent it and had its whole answer, in Unix time.
        root: the request's span.
        phases: those below it, in order.
    """

    begin_ns: int
    end_ns: int
    root: Received
    phases: Sequence[Received]

    @property
    def client_s(self) -> float:
        """Seconds that the client saw."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def difference_s(self) -> float:
        """Seconds that the client saw and the span does not have."""
        return self.client_s - self.root.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, draw and write the results."""
    args = _parse(argv)
    with span_collector() as collector:
        options = ("--model", args.model, "--served-name", _SERVED_NAME, "--otlp-endpoint", collector.url)
        with naiad_serve(options) as server:
            doors = _doors(server, args.tokens)
            for door in doors:
                _ask(doors[door], collector)
            turns = [{door: _ask(doors[door], collector) for door in doors} for _ in range(args.turns)]
    rows = [_row(door, [turn[door] for turn in turns]) for door in doors]
    print_rows(rows)
    middle = {door: _middle([turn[door] for turn in turns]) for door in doors}
    print(f"picture: {_draw(middle)}")
    settings = {"tokens": args.tokens, "turns": args.turns, "model": args.model}
    print(f"written: {write_report(NAME, settings, rows)}")
    return 0


def _doors(server: Served, num_tokens: int) -> dict[str, urllib.request.Request]:
    """A streamed request for each door."""
    triton = {"text_input": _PROMPT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    openai = {
        "model": _SERVED_NAME,
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    chat = openai | {"messages": [{"role": "user", "content": _PROMPT}]}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "text": (f"http://{server.http}/v2/models/text/generate_stream", triton),
        "ensemble": (f"http://{server.http}/v2/models/ensemble/generate_stream", triton),
        "completions": (f"http://{server.openai}/v1/completions", openai | {"prompt": _PROMPT}),
        "chat": (f"http://{server.openai}/v1/chat/completions", chat),
    }
    return {
        door: urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        for door, (url, body) in bodies.items()
    }


def _ask(request: urllib.request.Request, collector: SpanCollector) -> Traced:
    """Send a request as part of a trace of its own, and wait for its spans."""
    trace_id = secrets.token_hex(16)
    request.add_header("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01")
    begin_ns = time.time_ns()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    end_ns = time.time_ns()
    found: dict[str, Received] = {}
    give_up_s = time.monotonic() + _PATIENCE_S
    while not found.keys() > set(PHASES):
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"of a request only these spans came: {', '.join(found)}")
        time.sleep(0.05)
        spans = [each for each in collector.spans() if each.trace_id == trace_id]
        found = {each.name: each for each in spans if not each.is_tritons_own}
    phases = [found.pop(name) for name in PHASES]
    (root,) = found.values()
    if abs(sum(each.seconds for each in phases) - root.seconds) > _ROUNDING_S:
        raise RuntimeError("the phases of a request do not add up to its span")
    return Traced(begin_ns, end_ns, root, phases)


def _middle(requests: Sequence[Traced]) -> Traced:
    return sorted(requests, key=lambda each: each.difference_s)[len(requests) // 2]


def _row(door: str, requests: Sequence[Traced]) -> dict[str, Any]:
    def middle_ms(values: Sequence[float]) -> float:
        return round(1000 * statistics.median(values), 2)

    differences = [each.difference_s for each in requests]
    phases = {
        f"{name} ms": middle_ms([each.phases[place].seconds for each in requests])
        for place, name in enumerate(PHASES)
    }
    return {
        "door": door,
        "client ms": middle_ms([each.client_s for each in requests]),
        "span ms": middle_ms([each.root.seconds for each in requests]),
        **phases,
        "difference ms": middle_ms(differences),
        "most ms": round(1000 * max(differences), 2),
    }


def _draw(traced: dict[str, Traced]) -> str:
    """Draw a bar for each door: what the client saw, and the phases on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for place, each in enumerate(traced.values()):
        axes.barh(place, 1000 * each.client_s, height=0.7, color="0.85", label=None if place else "client")
        for number, phase in enumerate(each.phases):
            begin_ms = (phase.begin_ns - each.begin_ns) / 1e6
            label = None if place else phase.name
            axes.barh(place, 1000 * phase.seconds, 0.4, begin_ms, color=f"C{number}", label=label)
    axes.set_yticks(range(len(traced)), list(traced))
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds since the client sent the request", title="A streamed request by each door")
    figure.legend(loc="outside lower center", ncols=len(PHASES) + 1)
    path = plot_path(NAME)
    figure.savefig(path, dpi=120)
    return path.name


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.server.spans", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--tokens", type=at_least(2), default=32, metavar="N", help="of an answer")
    parser.add_argument("--turns", type=at_least(1), default=9, metavar="N", help="requests of each door")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
