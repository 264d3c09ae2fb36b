"""Triton's custom metrics as plain objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeMetric:
    """Remembers its value."""

    def __init__(
        self, log: Callable[[], None], labels: dict[str, str], buckets: list[float] | None = None
    ) -> None:
        self.labels, self.buckets = labels, buckets
        self._log = log
        self.value = 0.0
        self.writes = 0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value
        self.writes += 1
        self._log()

    def increment(self, value: float) -> None:
        assert value >= 0
        self.value += value
        self.writes += 1
        self._log()

    def observe(self, value: float) -> None:
        self.observed.append(value)
        self._log()


class FakeFamilies:
    """Makes metrics; remembers them, the kind of each family, and the order of writes."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.descriptions: dict[str, str] = {}
        self.metrics: list[tuple[str, FakeMetric]] = []
        self.order: list[str] = []

    def __call__(self, name: str, description: str, kind: str) -> Any:
        self.kinds[name] = kind
        self.descriptions[name] = description

        def make(**arguments: Any) -> FakeMetric:
            metric = FakeMetric(lambda: self.order.append(name), **arguments)
            self.metrics.append((name, metric))
            return metric

        return type("Family", (), {"Metric": staticmethod(make)})

    def find(self, name: str, value: str = "") -> FakeMetric:
        return next(m for n, m in self.metrics if n == name and (not value or value in m.labels.values()))
