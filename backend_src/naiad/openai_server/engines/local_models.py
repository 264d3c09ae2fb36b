"""All language models of the servers below one process, followed as they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Executor
from pathlib import Path

from naiad.engine_process.instance import claimed_names, engine_names, owner_names
from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.runtime_dir import runtime_directories_below
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.engines import model_names
from naiad.openai_server.engines.checkpoint_loader import CheckpointLoader
from naiad.openai_server.engines.local_model import LocalModel, MakeRecorder
from naiad.openai_server.engines.model_names import ModelNames

_LOOK_S = 0.2

# The server's runtime directory, and the name of the `llm` model.
_Key = tuple[Path, str]


class LocalModels:
    """Finds engines by their sockets in the servers' runtime directories. Belongs to the event loop."""

    def __init__(
        self,
        server_pid: int,
        pool: Executor,
        families: FamilyChoices,
        make_recorder: MakeRecorder | None = None,
    ) -> None:
        """Set up.

        Args:
            server_pid: the process above the servers.
            pool: runs what would hold up the event loop.
            families: how the families are chosen that say how a model writes.
            make_recorder: makes what records a model's requests; None: they are not recorded.
        """
        self.observes = True
        self._make_recorder = make_recorder
        self._server_pid = server_pid
        self._pool = pool
        self._loader = CheckpointLoader(families)
        self._models: dict[_Key, LocalModel] = {}
        self._last_seen_s: dict[_Key, float] = {}
        # The name that a model's engine has told last, and the one by which clients know the model.
        self._told: dict[_Key, str] = {}
        self._served_as: dict[_Key, str] = {}
        self._names = ModelNames()
        self._has_looked = False
        # Models whose engine is there or is being started again.
        self._present: set[_Key] = set()
        self._closed: list[LocalModel] = []

    async def watch(self) -> None:
        """Look for models for ever."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Look once: connect to new engines, and leave those that are gone for good."""
        loop = asyncio.get_running_loop()
        found, owners, claimed = await loop.run_in_executor(self._pool, self._engines)
        self._present = found | owners
        for key in found - self._models.keys():
            self._models[key] = LocalModel(*key, loop, self._pool, self._loader, self._make_recorder)
        closed = self._forget_those_gone(found | owners | claimed)
        self._closed += closed
        for model in closed:
            await loop.run_in_executor(self._pool, model.close)
        # An engine that starts again may take minutes to load its weights.
        self._names.see(self._served_as[key] for key in claimed & self._served_as.keys())
        self.by_name()
        self._has_looked = True

    def _forget_those_gone(self, seen: set[_Key]) -> list[LocalModel]:
        """Forget models whose server is gone, or which have been unloaded for a while; return them."""
        now_s, directories = time.monotonic(), {directory for directory, _ in seen}
        self._last_seen_s |= dict.fromkeys(seen & self._models.keys(), now_s)
        gone = [
            key
            for key, seen_s in self._last_seen_s.items()
            if self._models[key].info is None
            and (key[0] not in directories or now_s - seen_s > model_names.EXPECTED_BACK_S)
        ]
        for key in gone:
            del self._last_seen_s[key]
            self._told.pop(key, None)
            self._served_as.pop(key, None)
        return [self._models.pop(key) for key in gone]

    def by_name(self) -> dict[str, LocalModel]:
        """Name → model, of those that serve."""
        named: dict[str, LocalModel] = {}
        taken: set[str] = set()
        # In an order that a restart of this process does not change.
        for key, model in sorted(self._models.items(), key=lambda each: each[0]):
            info = model.info
            if info is not None:
                self._told[key] = info.checkpoint.served_name
            if key not in self._told:
                continue
            # Two models of one checkpoint: the second has the name of its `llm` model, and keeps it while the
            # engine of the first is away.
            name = model.engine if self._told[key] in taken else self._told[key]
            taken.add(name)
            self._served_as[key] = name
            if info is not None:
                named[name] = model
        self._names.see(named)
        return named

    def get(self, name: str | None) -> LocalModel:
        """Return the model of this name; None: the only model.

        Raises:
            APIError: there is no such model.
            EngineAwayError: its engine is restarting.
        """
        named = self.by_name()
        # The name of a model is its engine's to tell, and a server that has just started has not heard it.
        knows_all = self._has_looked and self._served_as.keys() >= self._present
        return self._names.choose(named, name, knows_all=knows_all)

    def expected(self) -> list[str]:
        """The names of the models that serve, and of those that are expected back soon."""
        self.by_name()
        return self._names.expected()

    def take_observations(self) -> list[tuple[LocalModel, ObservationBatch]]:
        """Return what has been observed of each model's requests since the last call."""
        models = [*self._models.values(), *self._closed]
        self._closed.clear()
        return [(model, model.observations.take()) for model in models]

    async def close(self) -> None:
        """Hang up everywhere."""
        loop = asyncio.get_running_loop()
        for model in self._models.values():
            with contextlib.suppress(OSError):
                await loop.run_in_executor(self._pool, model.close)
        self._loader.close()

    def _engines(self) -> tuple[set[_Key], set[_Key], set[_Key]]:
        """The engines that have a socket, their models, whose engines may be away, and all models."""
        directories = runtime_directories_below(self._server_pid)
        found, owners, claimed = (
            {(directory, name) for directory in directories for name in names(directory)}
            for names in (engine_names, owner_names, claimed_names)
        )
        return found, owners, claimed
