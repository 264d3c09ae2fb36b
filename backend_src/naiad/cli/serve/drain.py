"""The end of all requests, before the server is stopped."""

from __future__ import annotations

import http.client
import time
import urllib.request

from naiad.cli.console import say
from naiad.cli.serve.server_process import ServerProcess
from naiad.engine_process import StopNotice

_GAUGE = "nv_trt_llm_request_metrics{"
_LABEL = 'request_type="active"'
_METRICS_TIMEOUT_S = 2.0
# From the engine's deadline until its errors must have been sent: a step may be long.
_END_MARGIN_S = 5.0
# Between the steps of an ensemble a request is not counted for a moment; the gauge is updated often.
# Looks are counted, not seconds: while this process was stopped, nobody looked.
_NUM_IDLE_LOOKS = 8
_LOOK_S = 0.05


def end_requests(server: ServerProcess, metrics_address: str, timeout_s: int) -> bool:
    """Make the engines refuse new requests, and wait for those that run.

    Args:
        server: it serves.
        metrics_address: HOST:PORT of its metrics.
        timeout_s: what running requests get to finish; the engines then end them with an error.

    Returns:
        Whether none was active any more; False: some did not end in time.
    """
    say(f"stopping: new requests are refused, running ones have {timeout_s} s to finish")
    notice = StopNotice(server.runtime_directories(), timeout_s)
    deadline_s = time.monotonic() + timeout_s + _END_MARGIN_S
    num_idle_looks = 0
    try:
        while server.poll() is None and num_idle_looks < _NUM_IDLE_LOOKS:
            notice.tell()
            look_s = time.monotonic()
            num_idle_looks = num_idle_looks + 1 if num_active(metrics_address) == 0 else 0
            if not num_idle_looks and look_s > deadline_s:
                say("some requests do not end: they are cut off")
                return False
            time.sleep(_LOOK_S)
        return True
    finally:
        notice.close()


def num_active(metrics_address: str) -> int | None:
    """Requests that wait or run, of all our models; None: the metrics can not be read now."""
    try:
        url = f"http://{metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=_METRICS_TIMEOUT_S) as answer:
            return count_active(answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return None


def count_active(text: str) -> int:
    """The sum of the gauges in Prometheus' text format."""
    values = (line.rpartition(" ")[2] for line in text.splitlines() if _GAUGE in line and _LABEL in line)
    return sum(int(float(value)) for value in values)
