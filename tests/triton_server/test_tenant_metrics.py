"""Metrics of tenants: written where something has changed."""

from __future__ import annotations

from helpers.fake_metrics import FakeFamilies
from naiad.triton_server.metrics.tenant_metrics import COUNTERS, TenantMetrics
from naiad.usage import COUNTED, TenantUsage


def test_each_count_has_a_counter() -> None:
    assert sorted(COUNTERS.values()) == sorted(COUNTED)


def test_only_changes_are_written() -> None:
    families = FakeFamilies()
    usages = [TenantUsage("a", 1.5, 10.0, 5, 2, 7, 0)]
    metrics = TenantMetrics(families, {"model": "llm"}, lambda: usages)
    metrics.update()
    metrics.update()
    found = {(name, each.labels.get("kind")): each.value for name, each in families.metrics}
    assert found == {
        ("naiad_tenant_step_seconds_total", None): 1.5,
        ("naiad_tenant_kv_block_seconds_total", None): 10.0,
        ("naiad_tenant_tokens_total", "prompt"): 5,
        ("naiad_tenant_tokens_total", "cached"): 2,
        ("naiad_tenant_tokens_total", "output"): 7,
    }
    assert {each.writes for _, each in families.metrics} == {1}
    assert {each.labels["tenant"] for _, each in families.metrics} == {"a"}
    usages = [TenantUsage("a", 1.5, 10.0, 5, 2, 9, 0), TenantUsage("b", num_output_tokens=1)]
    metrics.update()
    assert [each.value for name, each in families.metrics if each.labels.get("kind") == "output"] == [9, 1]
    assert sum(each.writes for _, each in families.metrics) == 7
