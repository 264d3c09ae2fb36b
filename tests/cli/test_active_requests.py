from __future__ import annotations

from naiad.cli.serve.drain import count_active, num_active

METRICS = """# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="llm",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="llm",request_type="max",version="1"} 32
nv_trt_llm_request_metrics{model="other",request_type="active",version="1"} 2.000000
"""


def test_active_requests_of_all_models_are_counted() -> None:
    assert count_active(METRICS) == 5


def test_metrics_that_can_not_be_read_say_nothing() -> None:
    assert num_active("127.0.0.1:1") is None
