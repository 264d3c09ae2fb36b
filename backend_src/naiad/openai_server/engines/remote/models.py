"""The language models of a remote Triton server, followed as they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from naiad.engine_process.observations import ObservationBatch
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.engines.model_names import ModelNames
from naiad.openai_server.engines.remote.errors import server_away
from naiad.openai_server.engines.remote.model import LocalFiles, RemoteModel
from naiad.openai_server.engines.remote.shape import (
    ModelShape,
    NoTextModelError,
    models_behind,
    read_shape,
    takes_text,
)

_LOOK_S = 1.0
# A model that is loaded anew between two looks may have changed.
_READ_AGAIN_S = 30.0
_CALL_TIMEOUT_S = 5.0
# What a server answers whose list of models needs a key.
_RESTRICTED = "restricted"
# What a server answers that lists its models for nobody, and how these are called where no names are given.
_UNIMPLEMENTED = "StatusCode.UNIMPLEMENTED"
_USUAL_NAMES = ("ensemble", "text")
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default a channel waits up to two minutes before it tries again to reach a server.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """The server whose models are offered.

    Attributes:
        url: HOST:PORT of its gRPC port.
        files: describe the checkpoint of all of its models.
        model_names: the models that are offered; empty: all that take text.
        served_name: the name for clients of the only model in `model_names`; None: its own.
        control_headers: what the server wants to see before it lists its models, such as the key of model
            control.
    """

    url: str
    files: LocalFiles
    model_names: tuple[str, ...] = ()
    served_name: str | None = None
    control_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        url: str,
        tokenizer_dir: Path,
        families: FamilyChoices,
        model_names: tuple[str, ...] = (),
        served_name: str | None = None,
        control_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> RemoteServer:
        """Read the files of `tokenizer_dir`; see the attributes, and `LocalFiles.load`.

        Raises:
            ModelError: a file is missing or damaged.
        """
        files = LocalFiles.load(tokenizer_dir, families)
        return cls(
            url=url,
            files=files,
            model_names=model_names,
            served_name=served_name,
            control_headers=control_headers,
        )


class RemoteModels:
    """See `Models`."""

    def __init__(self, server: RemoteServer, pool: Executor) -> None:
        """Set up, in the event loop; `look` connects.

        Args:
            server: the server.
            pool: runs what would hold up the event loop.
        """
        # The Triton server counts its requests, these among them.
        self.observes = False
        self._server = server
        self._pool = pool
        self._client: InferenceServerClient | None = None
        # Models that are ready; None: one that can not be offered.
        self._models: dict[str, RemoteModel | None] = {}
        self._read_again_s = 0.0
        self._names = ModelNames()
        self._is_away = True
        self._was_refused = self._has_told_names = False

    async def watch(self) -> None:
        """Look for models for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look once: ask the server for its models, and for the configurations of new ones, or of all."""
        if self._client is None:
            self._client = InferenceServerClient(self._server.url, channel_args=_CHANNEL)
        try:
            ready = await self._ready_names(self._client)
        except InferenceServerException as error:
            self._note_refusal(str(error.message()))
            self._is_away = True
            self._models.clear()
            return
        self._is_away = self._was_refused = False
        is_due = time.monotonic() >= self._read_again_s
        if is_due:
            self._read_again_s = time.monotonic() + _READ_AGAIN_S
        for name in ready if is_due else ready - self._models.keys():
            # It may go while it is asked for; the next look finds it then.
            with contextlib.suppress(InferenceServerException):
                self._models[name] = await self._found(self._client, name)
        for name in self._models.keys() - ready:
            del self._models[name]
        self.by_name()

    def by_name(self) -> dict[str, RemoteModel]:
        """Name → model, of those that serve."""
        named = {
            self._server.served_name or name: model
            for name, model in self._models.items()
            if model is not None
        }
        self._names.see(named)
        return named

    def get(self, name: str | None) -> RemoteModel:
        """Return the model of this name; None: the only model.

        Raises:
            APIError: there is no such model.
            EngineAwayError: the server can not be reached, or has it no more.
        """
        named = self.by_name()
        if not named and self._is_away:
            raise server_away()
        return self._names.choose(named, name)

    def expected(self) -> list[str]:
        """The names of the models that serve, and of those that are expected back soon."""
        self.by_name()
        return self._names.expected()

    def take_observations(self) -> list[tuple[RemoteModel, ObservationBatch]]:
        """See `Models`: nothing is observed."""
        return []

    async def close(self) -> None:
        """Hang up; live generations fail."""
        if self._client is not None:
            await self._client.close()

    async def _ready_names(self, client: InferenceServerClient) -> set[str]:
        wanted = self._server.model_names
        try:
            index = await client.get_model_repository_index(
                headers=dict(self._server.control_headers), client_timeout=_CALL_TIMEOUT_S
            )
        except InferenceServerException as error:
            if error.status() != _UNIMPLEMENTED:
                raise
            return await self._ready_among(client, wanted or _USUAL_NAMES)
        return {
            each.name
            for each in index.models
            if each.state == "READY" and (not wanted or each.name in wanted)
        }

    async def _ready_among(self, client: InferenceServerClient, names: Sequence[str]) -> set[str]:
        """Which of these serve, for a server that lists its models for nobody, such as one behind a gate."""
        if not self._has_told_names:
            self._has_told_names = True
            logger.info(
                "%s does not list its models: it is asked for %s%s",
                self._server.url,
                ", ".join(names),
                "" if self._server.model_names else "; others are named with --model",
            )
        return {each for each in names if await client.is_model_ready(each, client_timeout=_CALL_TIMEOUT_S)}

    def _note_refusal(self, message: str) -> None:
        """Say once if the server lists its models only for those who have a key."""
        if _RESTRICTED in message and not self._was_refused:
            self._was_refused = True
            sent = "another key than" if self._server.control_headers else "no key:"
            logger.error(
                "%s lists its models only with a key, and was sent %s --model-control-key FILE of its "
                "`naiad serve`; until then requests get status 503",
                self._server.url,
                sent,
            )

    async def _found(self, client: InferenceServerClient, name: str) -> RemoteModel | None:
        """A model of the server; None if it can not be offered, which is said if it was asked for.

        Raises:
            InferenceServerException: the server does not answer, or the model has just gone.
        """
        config = await _config(client, name)
        if not takes_text(config) and name not in self._server.model_names:
            return None
        try:
            shape: ModelShape = read_shape(
                config, [await _config(client, each) for each in models_behind(config)]
            )
        except NoTextModelError as error:
            if name not in self._models:
                logger.warning("the model %s is not offered: %s", name, error)
            return None
        known = self._models.get(name)
        if known is not None and known.shape == shape:
            return known
        return RemoteModel(client, self._server.files, shape, self._pool, int(time.time()))


async def _config(client: InferenceServerClient, name: str) -> Any:
    return (await client.get_model_config(name, client_timeout=_CALL_TIMEOUT_S)).config
