"""Measures what the gate takes for each part of a streamed answer, beside HAProxy where it is installed.

    python -m perf.server.gate_cost
    python -m perf.server.gate_cost --streams 8,32,128 --parts-per-s 400,4000

Clients ask a server that only sends parts, in turns through the gate and through HAProxy with one thread,
which checks nothing. Every client must hear every part. The figure is the processor time of the process
between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.ports import free_port
from perf.common.report import print_rows, write_report

from naiad.cli.argument_types import at_least

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b'data: {"model_name":"ensemble","model_version":"1","text_output":" word"}\n\n'
_PART = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_REQUEST = (
    b"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\n"
    b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
)
_HAPROXY = """
global
    nbthread 1
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port}
    default_backend server
backend server
    server only 127.0.0.1:{server_port}
"""
_READY_S, _ANSWER_S = 30.0, 60.0
_HOST = "127.0.0.1"

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    args = _parse(argv)
    rows = asyncio.run(_measured(args))
    print_rows(rows)
    print("written:", write_report("gate-cost", vars(args), rows))
    return 0


async def _measured(args: argparse.Namespace) -> list[Row]:
    loads = [Load(*each, args.seconds) for each in itertools.product(args.streams, args.parts_per_s)]
    found: dict[tuple[Load, str], list[float]] = defaultdict(list)
    async with _server() as server_port:
        with contextlib.ExitStack() as stack:
            doors = _start_doors(stack, server_port)
            for port, _ in doors.values():
                await _until_listening(port)
            for _ in range(args.repeats):
                for load, (name, (port, pid)) in itertools.product(loads, doors.items()):
                    found[load, name].append(await load.through(port, pid))
    return [
        {
            "through": name,
            "streams": load.num_streams,
            "parts/s": load.parts_per_s,
            "µs a part": round(statistics.median(each), 1),
            "least": round(min(each), 1),
            "most": round(max(each), 1),
        }
        for (load, name), each in found.items()
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """Some streams that get some parts a second together, for some seconds."""

    num_streams: int
    parts_per_s: float
    seconds: float

    async def through(self, port: int, pid: int) -> float:
        """Ask through a port; return the microseconds that a process took for each part."""
        num_parts = round(self.parts_per_s * self.seconds / self.num_streams)
        pause_s = self.num_streams / self.parts_per_s
        before = _processor_ns(pid)
        await asyncio.gather(*(_heard(port, num_parts, pause_s) for _ in range(self.num_streams)))
        return (_processor_ns(pid) - before) / 1e3 / (num_parts * self.num_streams)


async def _heard(port: int, num_parts: int, pause_s: float) -> None:
    """Ask for a stream and read it to its end.

    Raises:
        RuntimeError: it is not what the server has sent.
    """
    body = json.dumps({"parts": num_parts, "pause_s": pause_s}).encode()
    reader, writer = await asyncio.open_connection(_HOST, port)
    writer.write(_REQUEST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    heard = await asyncio.wait_for(reader.read(-1), _ANSWER_S + num_parts * pause_s)
    writer.close()
    if not head.startswith(b"HTTP/1.1 200") or heard.count(_EVENT) != num_parts:
        raise RuntimeError(f"{heard.count(_EVENT)} of {num_parts} parts came: {head!r}")


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[int]:
    """A server that answers a request with the parts that it asks for; its port."""
    server = await asyncio.start_server(_answer, _HOST, 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        asked = json.loads(await reader.readexactly(int(length[1]))) if length else {"parts": 0, "pause_s": 0}
        writer.write(_HEAD)
        due_s = asyncio.get_running_loop().time()
        for _ in range(asked["parts"]):
            due_s += asked["pause_s"]
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            writer.write(_PART)
        writer.write(_LAST_CHUNK)
        await writer.drain()
    writer.close()


def _start_doors(stack: contextlib.ExitStack, server_port: int) -> dict[str, tuple[int, int]]:
    """Start the gate, and HAProxy if there is one; return port and process id of each."""
    gate, *others = (free_port() for _ in range(3))
    command = [sys.executable, "-m", "naiad.gate", "--host", _HOST, "--http-port", str(gate)]
    for name, port in zip(("grpc", "metrics"), others, strict=True):
        command += [f"--{name}-port", str(port), f"--server-{name}-port", str(server_port)]
    process = stack.enter_context(_running([*command, "--server-http-port", str(server_port)]))
    doors = {"gate": (gate, process.pid)}
    if shutil.which("haproxy"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="naiad-perf-")))
        port = free_port()
        config = folder / "haproxy.cfg"
        config.write_text(_HAPROXY.format(port=port, server_port=server_port), encoding="ascii")
        process = stack.enter_context(_running(["haproxy", "-db", "-f", str(config)]))
        doors["haproxy"] = (port, process.pid)
    return doors


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.terminate()


async def _until_listening(port: int) -> None:
    end_s = time.monotonic() + _READY_S
    while True:
        try:
            _, writer = await asyncio.open_connection(_HOST, port)
        except OSError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def _processor_ns(pid: int) -> int:
    """Nanoseconds that all threads of a process have run, as the system's scheduler counts them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--streams", type=_numbers, default=[8, 32], metavar="N,…", help="at the same time")
    add("--parts-per-s", type=_numbers, default=[400, 4000], metavar="N,…", help="of all streams together")
    add("--seconds", type=float, default=6.0, metavar="S", help="length of a turn")
    add("--repeats", type=at_least(1), default=3, metavar="N", help="turns")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
