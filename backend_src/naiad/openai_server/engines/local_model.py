"""A language model whose engine runs on this machine, reached by the engine's socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from pathlib import Path

from naiad.engine_process import AttachedClient
from naiad.engine_process.observations import ObservationBatch, Observations
from naiad.engine_process.protocol import Ready
from naiad.errors import EngineAwayError, EngineLostError, InternalError, NaiadError, place_of
from naiad.frontend.chunks import ChunkTexts
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.engines.checkpoint_loader import CheckpointLoader
from naiad.openai_server.engines.interface import LoadedCheckpoint
from naiad.openai_server.engines.local_generation import LocalGeneration
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot, SnapshotDesk
from naiad.outputs import EngineStats, RequestOutput
from naiad.recording.recorder import Recorder

_LOOK_PATIENCE_S = 0.2

# Makes a recorder of a model, given what returns its name.
MakeRecorder = Callable[[Callable[[], str]], Recorder]

logger = logging.getLogger(__name__)


class LocalModel:
    """One language model. `start` may be called again after a reload: it then serves the new engine."""

    def __init__(
        self,
        directory: Path,
        engine: str,
        loop: asyncio.AbstractEventLoop,
        pool: Executor,
        loader: CheckpointLoader,
        make_recorder: MakeRecorder | None = None,
    ) -> None:
        """Set up; a thread begins to look for the engine.

        Args:
            directory: the server's runtime directory.
            engine: the name of the `llm` model.
            loop: the event loop that reads generations.
            pool: runs what would hold up the event loop.
            loader: reads checkpoints.
            make_recorder: makes what records requests; None: they are not recorded.
        """
        self._recorder = None if make_recorder is None else make_recorder(self._served_name)
        self.engine = engine
        self.has_token_ids = True
        self.observations = Observations()
        self._loop = loop
        self._pool = pool
        self._loader = loader
        self._lock = threading.Lock()  # guards the live generations and the ids
        self._live: dict[int, LocalGeneration] = {}
        self._ids = itertools.count(1)
        self._loaded: LoadedCheckpoint | None = None
        # Of the engine whose checkpoint was read last.
        self._last_info: Ready | None = None
        self._loading = asyncio.Lock()
        self._snapshots = SnapshotDesk(loop, pool, self._name_of)
        self._client = AttachedClient(
            directory, engine, self._take_outputs, self._lost, lambda _id: None, self._snapshots.take
        )
        self._snapshots.client = self._client
        self._client.start(0)

    @property
    def info(self) -> Ready | None:
        """The engine's description of itself; None while none serves."""
        return self._client.info

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of the engine that served last; 0 if none has."""
        info = self.info or self._last_info
        return info.max_model_len if info else 0

    async def loaded(self) -> LoadedCheckpoint:
        """Return the checkpoint of the engine that serves now, loaded if need be.

        Raises:
            EngineAwayError: no engine serves.
            NaiadError: the checkpoint's files cannot be read.
        """
        async with self._loading:
            info = self.info
            if info is None:
                raise EngineAwayError(
                    f"the model {self.engine} does not serve now; try again in a few seconds"
                )
            if self._loaded is None or self._loaded.info is not info:
                self._loaded, self._last_info = None, info
                self._loaded = await self._loader.load(info)
            return self._loaded

    async def snapshot(self) -> NamedSnapshot:
        """Return what the engine is doing.

        Raises:
            EngineAwayError: no engine serves.
            UnavailableError: the engine is too old to tell.
        """
        return await self._snapshots.get()

    async def begin(
        self, loaded: LoadedCheckpoint, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, LocalGeneration]:
        """Read a request and send it to the engine, outside the event loop.

        Args:
            loaded: the checkpoint of this model.
            read: reads the request's body.

        Raises:
            APIError: the body is not valid.
            NaiadError: the engine does not take requests.
        """
        work = self._pool.submit(self._begin, loaded, read)
        begun = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            # The client is gone. Work that waits for a thread is not begun any more; else the request may be
            # on its way to the engine, and its turn and its place among its key's requests last as long.
            if not work.cancel():
                begun.add_done_callback(_close)
                await asyncio.wait([begun])
            raise

    def report(self, batch: ObservationBatch) -> None:
        """Have Triton's metrics port show the requests of a batch; may wait for the engine to read."""
        # To write a gap between tokens there costs more than this server spends on a token.
        self._client.report(ObservationBatch(batch.first_token_s, [], batch.ended))

    def close(self) -> None:
        """Hang up; live generations fail."""
        self._client.close()

    def _served_name(self) -> str:
        info = self.info or self._last_info
        return info.checkpoint.served_name if info else self.engine

    def _begin(
        self, loaded: LoadedCheckpoint, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, LocalGeneration]:
        asked = read(loaded.reader)
        generation = self._register(asked, loaded.texts)
        requests = asked.request.engine_requests(generation.first_id)
        self.observations.begin(requests, asked.request.outputs.num_return_sequences)
        if self._recorder is not None:
            self._recorder.begin(requests)
        try:
            self._client.submit(requests)
        except NaiadError:
            self.observations.forget(requests)
            if self._recorder is not None:
                self._recorder.forget(requests)
            self._forget(generation.sequence_ids)
            raise
        return asked, generation

    def _register(self, asked: AskedGeneration, texts: ChunkTexts) -> LocalGeneration:
        request = asked.request
        with self._lock:
            first_id = next(self._ids)
            for _ in range(request.num_sequences - 1):
                next(self._ids)
            generation = LocalGeneration(request, first_id, texts, self._end, asked.parsers(), asked.trace)
            self._live.update(dict.fromkeys(generation.sequence_ids, generation))
        return generation

    def _name_of(self, sequence_id: int) -> str | None:
        """The name of a live sequence: its request's id, and from the second sequence on a number."""
        with self._lock:
            generation = self._live.get(sequence_id)
        if generation is None:
            return None
        index = sequence_id - generation.first_id
        return f"{generation.request.request_id}/{index}" if index else generation.request.request_id

    def _forget(self, sequence_ids: Collection[int]) -> None:
        with self._lock:
            for sequence_id in sequence_ids:
                self._live.pop(sequence_id, None)

    def _end(self, generation: LocalGeneration, live_ids: list[int]) -> None:
        """Forget a generation whose reader has left; in the event loop."""
        self._forget(generation.sequence_ids)
        if live_ids:
            # An engine that does not read would hold up the event loop; the pool may be busy with prompts.
            self._loop.run_in_executor(None, self._client.abort, live_ids)

    def _take_outputs(self, outputs: list[RequestOutput], _stats: EngineStats | None) -> None:
        """Hand a step's outputs to their generations; in the client's thread."""
        self.observations.take_outputs(outputs)
        if self._recorder is not None:
            self._recorder.take_outputs(outputs)
        with self._lock:
            places = [self._live.get(output.sequence_id) for output in outputs]
        touched: dict[int, LocalGeneration] = {}
        for output, generation in zip(outputs, places, strict=True):
            if generation is not None:
                self._hand_over(output, generation)
                touched[generation.first_id] = generation
        if touched:
            self._loop.call_soon_threadsafe(_wake, list(touched.values()))

    def _hand_over(self, output: RequestOutput, generation: LocalGeneration) -> None:
        try:
            generation.take(output)
        except Exception as error:  # noqa: BLE001 — only this generation ends
            logger.error("an output could not be taken: %s", place_of(error))
            generation.fail(InternalError("internal error while answering the request"))
            self._forget(generation.sequence_ids)
            self._client.abort(list(generation.sequence_ids))

    def _lost(self, sequence_ids: list[int]) -> None:
        self.observations.lose(sequence_ids)
        if self._recorder is not None:
            self._recorder.lose(sequence_ids)
        with self._lock:
            found = {id(each): each for each in map(self._live.get, sequence_ids) if each is not None}
        for generation in found.values():
            generation.fail(EngineLostError())
        self._loop.call_soon_threadsafe(_wake, list(found.values()))


def _wake(generations: list[LocalGeneration]) -> None:
    for generation in generations:
        generation.wake()


def _close(begun: asyncio.Future[tuple[AskedGeneration, LocalGeneration]]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result()[1].close()
