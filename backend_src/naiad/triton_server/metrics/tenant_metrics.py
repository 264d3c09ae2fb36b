"""Metrics of what each tenant has used of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from naiad.triton_server.metrics.request_metrics import MetricFamilyFactory
from naiad.usage import TenantUsage

TENANT, KIND = "tenant", "kind"
# (family, kind) → attribute of `TenantUsage`.
COUNTERS: dict[tuple[str, str], str] = {
    ("naiad_tenant_step_seconds_total", ""): "step_s",
    ("naiad_tenant_kv_block_seconds_total", ""): "block_s",
    ("naiad_tenant_tokens_total", "prompt"): "num_prompt_tokens",
    ("naiad_tenant_tokens_total", "cached"): "num_cached_tokens",
    ("naiad_tenant_tokens_total", "output"): "num_output_tokens",
    ("naiad_tenant_tokens_total", "draft"): "num_draft_tokens",
}
DESCRIPTIONS: dict[str, str] = {
    "naiad_tenant_step_seconds_total": "Seconds of steps by tenant, divided among rows by computed tokens",
    "naiad_tenant_kv_block_seconds_total": "KV cache blocks times seconds held, by tenant",
    "naiad_tenant_tokens_total": "Tokens by tenant and kind: prompt, of these cached, output, draft",
}


class TenantMetrics:
    """Counters for each tenant that has used the engine; there are at most 65."""

    def __init__(
        self,
        family: MetricFamilyFactory,
        labels: Mapping[str, str],
        usages: Callable[[], Sequence[TenantUsage]],
    ) -> None:
        """Create the families.

        Args:
            family: makes a metric family.
            labels: of every metric.
            usages: returns what each tenant has used, the same object until it changes.
        """
        self._labels = dict(labels)
        self._usages = usages
        self._families = {name: family(name, text, "counter") for name, text in DESCRIPTIONS.items()}
        self._counters: dict[tuple[str, str, str], Any] = {}
        self._written: dict[str, TenantUsage] = {}
        self._last: Sequence[TenantUsage] = ()

    def update(self) -> None:
        """Write what has changed."""
        usages = self._usages()
        if usages is self._last:
            return
        for usage in usages:
            before = self._written.get(usage.tenant) or TenantUsage(usage.tenant)
            for (name, kind), attribute in COUNTERS.items():
                change = getattr(usage, attribute) - getattr(before, attribute)
                if change > 0:
                    self._counter(name, kind, usage.tenant).increment(change)
            self._written[usage.tenant] = usage
        self._last = usages

    def delete(self) -> None:
        """Remove the metrics from the port."""
        self._counters.clear()
        self._families.clear()

    def _counter(self, name: str, kind: str, tenant: str) -> Any:
        key = (name, kind, tenant)
        if key not in self._counters:
            labels = self._labels | {TENANT: tenant} | ({KIND: kind} if kind else {})
            self._counters[key] = self._families[name].Metric(labels=labels)
        return self._counters[key]
