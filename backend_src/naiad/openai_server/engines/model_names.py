"""The names of models that come and go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

from naiad.errors import EngineAwayError
from naiad.openai_server.api.errors import unknown_model

# How long a model that has gone is expected back, before it counts as unloaded.
EXPECTED_BACK_S = 60.0

ModelType = TypeVar("ModelType")


class ModelNames:
    """Remembers which models have served lately."""

    def __init__(self) -> None:
        """Start without any."""
        self._last_seen_s: dict[str, float] = {}

    def see(self, names: Iterable[str]) -> None:
        """Remember that these serve now."""
        self._last_seen_s.update(dict.fromkeys(names, time.monotonic()))

    def expected(self) -> list[str]:
        """The names of the models that serve, and of those that are expected back soon."""
        since_s = time.monotonic() - EXPECTED_BACK_S
        return [name for name, seen_s in self._last_seen_s.items() if seen_s > since_s]

    def choose(
        self, named: Mapping[str, ModelType], name: str | None, *, knows_all: bool = True
    ) -> ModelType:
        """Return the model of this name; None: the only model.

        Args:
            named: the models that serve.
            name: what the client asks for.
            knows_all: whether the names of all models that are loaded are known.

        Raises:
            APIError: there is no such model.
            EngineAwayError: it does not serve now, or may not.
        """
        if name is None and len(named) == 1:
            return next(iter(named.values()))
        if name is not None and name in named:
            return named[name]
        if name in self.expected() or (name is not None and not knows_all):
            raise EngineAwayError(f"the model {name} does not serve now; try again in a few seconds")
        raise unknown_model(name or "")
