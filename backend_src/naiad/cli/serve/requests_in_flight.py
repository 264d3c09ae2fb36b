"""How many requests the engine has, by the server's metrics."""

from __future__ import annotations

import http.client
import urllib.request

_GAUGE = "nv_trt_llm_request_metrics{"
_LABEL = 'request_type="active"'
_TIMEOUT_S = 2.0


def num_active(metrics_address: str) -> int | None:
    """Requests that wait or run, of all our models; None: the metrics can not be read now."""
    try:
        with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=_TIMEOUT_S) as answer:
            return count_active(answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return None


def count_active(text: str) -> int:
    """The sum of the gauges in Prometheus' text format."""
    values = (line.rpartition(" ")[2] for line in text.splitlines() if _GAUGE in line and _LABEL in line)
    return sum(int(float(value)) for value in values)
