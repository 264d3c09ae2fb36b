"""Measures how long people wait when something starts, stops, leaves or dies.

    python -m perf.server.waits

A server with the default settings is started twice, and the second start counts. Clients that leave close
their connection; their blocks are free again when the metrics say so, which are asked as fast as they
answer. A process is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import Any

import psutil
from perf.common.report import print_rows, write_report
from perf.server.serve_process import Served, naiad_serve
from perf.server.soak.memory import ENGINE, role_of

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import InternalError

_PATIENCE_S = 120.0
_PATH = "/v2/models/text/generate_stream"
_USED = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"'
_LONG = 1500
_NUM_STREAMS = 8
_EXIT_TIMEOUT_S = 2
_STUB = "detokenizer"

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument(
        "--leaves", type=int, default=50, metavar="N", help="clients that leave while decoding"
    )
    args = parser.parse_args()
    options = ["--model", str(resolve_model(args.model)), "--exit-timeout-s", str(_EXIT_TIMEOUT_S)]
    with naiad_serve(options):
        pass
    rows: list[Row] = []
    start_s = time.perf_counter()
    with naiad_serve(options) as server:
        rows.append(_row("second start → it serves", time.perf_counter() - start_s))
        _answer(server)
        rows.append(_row("client gone in decode → its blocks are free", *_leaves(server, 4, args.leaves)))
        gone = _leaves(server, _LONG, args.leaves // 5, waits=False)
        rows.append(_row(f"client gone in the prefill of {_LONG:,} words → its blocks are free", *gone))
        rows += _kill(server, "the engine", ENGINE)
        rows += _kill(server, "the stub of the detokenizer", _STUB)
        # Why a wait was long is told by what the supervisor did meanwhile.
        print(*(line for line in server.last_lines if "naiad: " in line), sep="")
    rows.append(_row("SIGTERM at rest → the end", _end_s(options, 0)))
    name = f"SIGTERM with {_NUM_STREAMS} long streams and --exit-timeout-s {_EXIT_TIMEOUT_S} → the end"
    rows.append(_row(name, _end_s(options, _NUM_STREAMS)))
    print_rows(rows)
    print("written:", write_report("waits", vars(args), rows))
    return 0


def _row(what: str, *seconds: float) -> Row:
    return {
        "what": what,
        "median_s": round(statistics.median(seconds), 3),
        "max_s": round(max(seconds), 3),
        "times": len(seconds),
    }


def _sent(server: Served, num_words: int, num_tokens: int) -> http.client.HTTPConnection:
    """Send a prompt of so many words."""
    # Each prompt is new, so that nothing of it is in the prefix cache.
    words = [f"{time.monotonic_ns()}", *["word"] * num_words]
    body = {"text_input": " ".join(words), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(server.http, timeout=_PATIENCE_S)
    connection.request("POST", _PATH, json.dumps(body))
    return connection


@contextmanager
def _stream(server: Served, num_words: int, num_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """Send a prompt of so many words, and yield the answer when its headers have come."""
    connection = _sent(server, num_words, num_tokens)
    try:
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise InternalError(f"a request was refused: {answer.status} {answer.read()[-200:]!r}")
        yield answer
    finally:
        connection.close()


def _answer(server: Served) -> None:
    """Have a short request answered.

    Raises:
        InternalError: it was not.
    """
    with _stream(server, 4, 4) as answer:
        text = answer.read()
    if b'"error"' in text:
        raise InternalError(f"a request was not answered: {text[-200:]!r}")


def _leaves(server: Served, num_words: int, num: int, *, waits: bool = True) -> list[float]:
    """Seconds from the end of a client to free blocks, once for each of `num` clients in turn.

    Args:
        server: the server.
        num_words: length of each prompt.
        num: number of clients.
        waits: a client leaves after its first token; False: while its prompt is computed.
    """
    seconds = []
    for _ in range(num):
        if waits:
            with _stream(server, num_words, 1000) as answer:
                _read_token(answer)
                left_s = time.perf_counter()
        else:
            left_s = _leave_early(server, num_words)
        _eventually(lambda: _used_blocks(server) == 0)
        seconds.append(time.perf_counter() - left_s)
    return seconds


def _leave_early(server: Served, num_words: int) -> float:
    """Send a long prompt and leave when it has blocks; return the time."""
    connection = _sent(server, num_words, 8)
    _eventually(lambda: _used_blocks(server) > 0)
    left_s = time.perf_counter()
    connection.close()
    return left_s


def _kill(server: Served, name: str, role: str) -> list[Row]:
    """Kill a process below streams; measure until all have ended, and until a request is answered again."""
    with ExitStack() as stack:
        answers = [stack.enter_context(_stream(server, 4, 5000)) for _ in range(_NUM_STREAMS)]
        for answer in answers:
            _read_token(answer)
        os.kill(_process(server.pid, role), signal.SIGKILL)
        killed_s = time.perf_counter()
        for answer in answers:
            _read_to_its_end(answer)
        ended_s = time.perf_counter() - killed_s
    _eventually(lambda: _is_answered(server))
    served_s = time.perf_counter() - killed_s
    return [
        _row(f"kill of {name} → {_NUM_STREAMS} streams have ended", ended_s),
        _row(f"kill of {name} → a request is answered", served_s),
    ]


def _read_token(answer: http.client.HTTPResponse) -> None:
    """Read the first event of a stream.

    Raises:
        InternalError: it is an error.
    """
    line = answer.readline()
    if not line.startswith(b"data:") or b'"error"' in line:
        raise InternalError(f"a stream began with {line[-200:]!r}")


def _read_to_its_end(answer: http.client.HTTPResponse) -> None:
    """Read a stream until its error, or, where the server went too, until the connection's end.

    Raises:
        InternalError: it ended as if it were whole.
    """
    try:
        text = answer.read()
    except (OSError, http.client.HTTPException):
        return
    if b'"error"' not in text:
        raise InternalError("a stream ended without an error")


def _end_s(options: list[str], num_streams: int) -> float:
    """Seconds from SIGTERM to the end of a server, with so many long streams."""
    with naiad_serve(options) as server, ExitStack() as stack:
        for _ in range(num_streams):
            _read_token(stack.enter_context(_stream(server, 4, 5000)))
        process = psutil.Process(server.pid)
        told_s = time.perf_counter()
        process.terminate()
        # The exit code is taken by the context.
        _eventually(lambda: process.status() == psutil.STATUS_ZOMBIE or not process.is_running())
        return time.perf_counter() - told_s


def _process(pid: int, role: str) -> int:
    for process in psutil.Process(pid).children(recursive=True):
        if role_of(process) == role:
            return process.pid
    raise InternalError(f"no process of {role} is there")


def _is_answered(server: Served) -> bool:
    try:
        _answer(server)
    except (OSError, http.client.HTTPException, InternalError):
        return False
    return True


def _used_blocks(server: Served) -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_USED))


def _eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise InternalError(f"nothing has changed in {_PATIENCE_S:g} s")
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
