"""Ends all requests before the server is stopped."""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.request
from pathlib import Path

from naiad.cli.console import say_if_possible
from naiad.cli.serve.server_process import ServerProcess
from naiad.engine_process import StopNotice

_GAUGE = "nv_trt_llm_request_metrics{"
_LABEL = 'request_type="active"'
_METRICS_TIMEOUT_S = 2.0
# Time for the engine's errors to be sent after its deadline; a step may be long.
_END_MARGIN_S = 5.0
# Between the steps of an ensemble the metrics miss a request for a moment, so they must show no request
# several times in a row. Reads are counted instead of seconds because this process may have been suspended.
_NUM_IDLE_READS = 8
_READ_INTERVAL_S = 0.05


def end_requests(server: ServerProcess, metrics_address: str, timeout_s: int) -> bool:
    """Make the engines refuse new requests, and wait until the running ones have ended.

    Args:
        server: the running server.
        metrics_address: HOST:PORT of its metrics.
        timeout_s: time that running requests get; after it the engines end them with an error.

    Returns:
        Whether all requests have ended.
    """
    say_if_possible(f"stopping: new requests are refused, running ones have {timeout_s} s to finish")
    deadline_s = time.monotonic() + timeout_s + _END_MARGIN_S
    notice = StopNotice(_directories(server, deadline_s), timeout_s)
    num_idle_reads = 0
    try:
        while server.poll() is None and num_idle_reads < _NUM_IDLE_READS:
            # This process may lack descriptors for a moment.
            with contextlib.suppress(OSError):
                notice.send()
            read_s = time.monotonic()
            # The metrics miss the requests of a reloaded model as long as its old process writes them.
            is_idle = num_active(metrics_address) == 0 and notice.is_done()
            num_idle_reads = num_idle_reads + 1 if is_idle else 0
            if not num_idle_reads and read_s > deadline_s:
                say_if_possible("some requests do not end: they are cut off", "warning")
                return False
            time.sleep(_READ_INTERVAL_S)
        return True
    finally:
        notice.close()


def _directories(server: ServerProcess, deadline_s: float) -> list[Path]:
    """The directories of the engines' sockets; without descriptors to look with, look again until then."""
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            return server.runtime_directories()
        time.sleep(_READ_INTERVAL_S)
    return []


def num_active(metrics_address: str) -> int | None:
    """Number of requests that wait or run, of all models; None if the metrics can not be read now."""
    try:
        url = f"http://{metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=_METRICS_TIMEOUT_S) as answer:
            return count_active(answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return None


def count_active(text: str) -> int:
    """Sum up the gauges of all models in Prometheus' text format."""
    values = (line.rpartition(" ")[2] for line in text.splitlines() if _GAUGE in line and _LABEL in line)
    return sum(int(float(value)) for value in values)
