"""The metrics of the requests that came through this server, for each model."""

from __future__ import annotations

from naiad.engine_process.observations import ObservationBatch
from naiad.frontend.request_families import (
    BETWEEN_TOKENS,
    DOOR,
    END_LABEL,
    ENDS,
    ENDS_DESCRIPTION,
    FIRST_TOKEN,
    OPENAI_DOOR,
    REASONS,
    histogram_families,
    values_of,
)
from naiad.openai_server.metrics.text_format import Family, Histograms, Values


class DoorMetrics:
    """The families that Triton's models have of their requests, with `door="openai"`.

    They outlive the engines: a model that is loaded again, or whose server was restarted, counts on.
    """

    def __init__(self) -> None:
        """Start without models."""
        self._ends = Values(ENDS, ENDS_DESCRIPTION, "counter")
        # Model → name of the family → histogram; buckets of lengths depend on the model.
        self._histograms: dict[str, dict[str, tuple[Histograms, dict[str, str]]]] = {}

    def add_model(self, model: str, max_model_len: int) -> None:
        """Make a model's metrics, with nothing counted; those that there are stay.

        Args:
            model: the name of the `llm` model.
            max_model_len: upper end of the buckets of lengths, in tokens.
        """
        if model in self._histograms:
            return
        labels = {"model": model, DOOR: OPENAI_DOOR}
        made = self._histograms[model] = {}
        for family in histogram_families(max_model_len):
            histograms = Histograms(family.name, family.description, family.buckets)
            made[family.name] = histograms, labels | dict(family.labels)
            histograms.observe(made[family.name][1], 0, times=0)
        for reason in REASONS.values():
            self._ends.add({**labels, END_LABEL: reason}, 0)

    def take(self, model: str, batch: ObservationBatch) -> None:
        """Count the observations of a model that has been added."""
        for ended in batch.ended:
            self._ends.add({"model": model, DOOR: OPENAI_DOOR, END_LABEL: REASONS[ended.reason]})
            if ended.has_begun:
                for name, value in values_of(ended).items():
                    self._observe(model, name, value)
        for seconds in batch.first_token_s:
            self._observe(model, FIRST_TOKEN, seconds)
        for each_s, num_tokens in batch.gaps:
            self._observe(model, BETWEEN_TOKENS, each_s, num_tokens)

    def families(self) -> list[Family]:
        """The families of all models."""
        return [
            self._ends,
            *(histograms for made in self._histograms.values() for histograms, _ in made.values()),
        ]

    def _observe(self, model: str, name: str, value: float, times: int = 1) -> None:
        histograms, labels = self._histograms[model][name]
        histograms.observe(labels, value, times)
