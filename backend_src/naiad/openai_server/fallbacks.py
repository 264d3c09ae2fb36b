"""Models that answer in place of others while those cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from naiad.errors import ConfigError, EngineLostError, NaiadError, UnavailableError
from naiad.openai_server.metrics.text_format import Values

if TYPE_CHECKING:
    from naiad.openai_server.engines.interface import Models

# A queue that is full, a first token that is expected too late, an engine that is away or has just been lost.
_REASONS = (UnavailableError, EngineLostError)

logger = logging.getLogger(__name__)


class Fallbacks:
    """Model → the model that answers instead. Nothing falls back further."""

    def __init__(self, others: Mapping[str, str] | None = None) -> None:
        """Set up.

        Args:
            others: name of a model → name of the other one; None: there are no fallbacks.
        """
        self._others = dict(others or {})
        self.counted = Values(
            "naiad_openai_fallbacks_total", "Requests passed on to another model, by both names", "counter"
        )

    @classmethod
    def parse(cls, option: str, words: Sequence[str]) -> Fallbacks:
        """Read the words of an option, each MODEL=OTHER.

        Raises:
            ConfigError: a word is no pair of two models, or a model is named twice.
        """
        others: dict[str, str] = {}
        for word in words:
            model, _, other = word.partition("=")
            if not model or not other or model == other:
                raise ConfigError(option, word, "MODEL=OTHER, the names of two models")
            if model in others:
                raise ConfigError(option, word, f"one fallback for {model}, not also {others[model]}")
            others[model] = other
        return cls(others)

    def unknown(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return the pairs MODEL=OTHER, and what is wrong with each, in which a model is none of these.

        Args:
            names: of all models that are known.
        """
        known = sorted(set(names))
        there = f"the models are {', '.join(known)}" if known else "there are none"
        return [
            (f"{model}={other}", f"{name!r} is no model now ({there})")
            for model, other in self._others.items()
            for name in (model, other)
            if name not in known
        ]

    def refuse_unknown(self, option: str, names: Iterable[str]) -> None:
        """Refuse names that no model will ever have.

        Args:
            option: the name of the option that the pairs come from.
            names: of all models that there can be.

        Raises:
            ConfigError: a pair names another model.
        """
        names = sorted(set(names))
        for pair, _ in self.unknown(names):
            raise ConfigError(option, pair, f"MODEL=OTHER, two of the names {', '.join(names)}")

    def after(self, model: str | None, error: NaiadError, models: Models) -> str | None:
        """Return the model to ask after one could not answer; None: nothing is left but the error.

        Args:
            model: the model that was asked.
            error: why it did not answer.
            models: the models that serve.
        """
        other = None if model is None else self._others.get(model)
        if model is None or other is None or not isinstance(error, _REASONS):
            return None
        if other not in models.by_name():
            logger.warning("%s cannot answer for %s: it does not serve", other, model)
            return None
        self.counted.add({"model": model, "fallback": other})
        return other
