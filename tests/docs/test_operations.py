"""The dashboard and the alert rules speak of metrics, labels and values that are really exported."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helpers.doc_names import ROOT
from helpers.fake_metrics import FakeFamilies
from naiad.engine_process.observations import ObservationBatch
from naiad.outputs import EngineStats
from naiad.triton_server.metrics.engine_metrics import Metrics
from naiad.usage import COUNTED, TenantUsage

FOLDER = ROOT / "docs" / "operations"
# The server's own, with the reasons it gives.
SERVERS = {"nv_inference_request_success": set(), "nv_inference_request_failure": {"reason"}}
REASONS = {"REJECTED", "CANCELED", "BACKEND", "OTHER"}
# Prometheus adds these two.
SCRAPED = {"instance", "job"}

_METRIC = re.compile(r"(?<![\w:])(?:vllm:|nv_|naiad_)\w+")
_SELECTOR = re.compile(r"((?:vllm:|nv_|naiad_)\w+|up)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*=~?\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def exported() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Series → its labels; label → the values it has."""
    families = FakeFamilies()
    used = [TenantUsage("label", *[1] * len(COUNTED))]
    Metrics(families, "llm", "1", 2048, usages=lambda: used).update(EngineStats(), ObservationBatch())
    series: dict[str, set[str]] = {name: {"model", "version"} | labels for name, labels in SERVERS.items()}
    values: dict[str, set[str]] = {"reason": REASONS}
    for name, metric in families.metrics:
        is_histogram = families.kinds[name] == "histogram"
        for suffix in ("_bucket", "_count", "_sum") if is_histogram else ("",):
            series.setdefault(name + suffix, set()).update(metric.labels)
        if is_histogram:
            series[name + "_bucket"].add("le")
        for label, value in metric.labels.items():
            if label not in ("model", "version"):
                values.setdefault(label, set()).add(value)
    return series, values


SERIES, VALUES = exported()


def dashboard() -> Any:
    return json.loads((FOLDER / "grafana-dashboard.json").read_text())


def rules() -> list[Any]:
    groups = yaml.safe_load((FOLDER / "prometheus-alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def graphs() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in graphs():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in rules())


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_names_what_is_exported(expression: str) -> None:
    metrics = set(_METRIC.findall(expression))
    assert metrics <= set(SERIES)
    assert metrics or "up{" in expression
    assert expression.count("(") == expression.count(")")
    for name, matchers in _SELECTOR.findall(expression):
        found = _MATCHER.findall(matchers)
        assert found or not matchers
        for label, value in found:
            assert label in SERIES.get(name, set()) | SCRAPED
            assert "$" in value or set(value.split("|")) <= VALUES.get(label, {value})
    for labels in _GROUPING.findall(expression):
        wanted = {label.strip() for label in labels.split(",")}
        assert wanted <= SCRAPED.union(*(SERIES[name] for name in metrics))


def test_a_name_that_is_not_exported_is_found() -> None:
    assert not set(_METRIC.findall("rate(vllm:gone_total[5m])")) <= set(SERIES)


def test_queries_of_the_dashboards_variables_name_what_is_exported() -> None:
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "instance", "model", "price_per_hour"}
    for name in ("instance", "model"):
        assert set(_METRIC.findall(variables[name]["query"]["query"])) <= set(SERIES)


def test_panels_have_titles_units_and_room() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in graphs():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or (one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"])
        )


def test_every_alert_is_explained() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", rule["for"])
        assert set(rule["annotations"]) == {"summary", "description"}
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= {"model", "instance"}
