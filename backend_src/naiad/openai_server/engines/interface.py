"""What the server asks of the language models that it offers, wherever their engines are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.protocol import Ready
from naiad.frontend.chunks import ChunkTexts
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.engines.generation import Generation
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What requests are read and answered with, for one engine.

    Attributes:
        info: the engine's description of itself.
        tokenizer: the checkpoint's tokenizer.
        reader: reads requests.
        texts: makes text of tokens.
    """

    info: Ready
    tokenizer: Tokenizer
    reader: RequestReader
    texts: ChunkTexts


class Model(Protocol):
    """One language model."""

    @property
    def engine(self) -> str:
        """Its name at the Triton server, which labels its metrics."""

    @property
    def has_token_ids(self) -> bool:
        """Whether the tokens of its answers are known, not only their text and number."""

    @property
    def info(self) -> Ready | None:
        """The description of the engine; None while none serves."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of the engine that served last; 0 if none has."""

    async def loaded(self) -> LoadedCheckpoint:
        """Return the checkpoint of the engine that serves now.

        Raises:
            EngineAwayError: no engine serves.
            NaiadError: the checkpoint's files cannot be read.
        """

    async def begin(
        self, loaded: LoadedCheckpoint, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, Generation]:
        """Read a request and send it to the engine, outside the event loop.

        Args:
            loaded: the checkpoint of this model.
            read: reads the request's body.

        Raises:
            APIError: the body is not valid.
            NaiadError: the engine does not take requests.
        """

    async def snapshot(self) -> NamedSnapshot:
        """Return what the engine is doing.

        Raises:
            APIError: it can not be asked.
            UnavailableError: no engine serves, or it is too old to tell.
        """

    def report(self, batch: ObservationBatch) -> None:
        """Have Triton's metrics port show the requests of a batch; may wait."""


class Models(Protocol):
    """All language models, followed as they come and go. Belongs to the event loop."""

    @property
    def observes(self) -> bool:
        """Whether requests are counted by this server; otherwise the Triton server counts them."""

    async def watch(self) -> None:
        """Look for models for ever."""

    async def look(self) -> None:
        """Look once."""

    def by_name(self) -> Mapping[str, Model]:
        """Name → model, of those that serve."""

    def get(self, name: str | None) -> Model:
        """Return the model of this name; None: the only model.

        Raises:
            APIError: there is no such model.
            EngineAwayError: its engine is restarting.
        """

    def expected(self) -> list[str]:
        """The names of the models that serve, and of those that are expected back soon."""

    def take_observations(self) -> Sequence[tuple[Model, ObservationBatch]]:
        """Return what has been observed of each model's requests since the last call."""

    async def close(self) -> None:
        """Hang up everywhere."""
