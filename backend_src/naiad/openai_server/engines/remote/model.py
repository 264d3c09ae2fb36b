"""A language model of a remote Triton server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc.aio import InferenceServerClient

from naiad.config import ModelConfig
from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.protocol import Checkpoint, Ready
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, grammar_of
from naiad.openai_server.api.reading import AskedGeneration, RequestReader
from naiad.openai_server.api.refusals import remote_refusals
from naiad.openai_server.engines.interface import LoadedCheckpoint
from naiad.openai_server.engines.remote.generation import RemoteGeneration
from naiad.openai_server.engines.remote.inputs import check_owner, row_inputs
from naiad.openai_server.engines.remote.shape import ModelShape
from naiad.openai_server.engines.snapshot_desk import NamedSnapshot
from naiad.outputs import EngineStats
from naiad.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files on this machine that describe the remote checkpoint.

    Attributes:
        directory: where they are.
        config: the checkpoint's configuration.
        tokenizer: its tokenizer.
        grammar: how it writes answers.
    """

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    grammar: OutputGrammar

    @classmethod
    def load(cls, directory: Path, families: FamilyChoices) -> LocalFiles:
        """Read the files: the tokenizer's, and config.json. No weights are needed.

        Args:
            directory: where they are.
            families: how the families are chosen that say how the model writes.

        Raises:
            ModelError: a file is missing or damaged.
        """
        config, tokenizer = ModelConfig.from_directory(directory), Tokenizer.from_directory(directory)
        return cls(directory, config, tokenizer, _visible(grammar_of(tokenizer, families), tokenizer))


class RemoteModel:
    """One language model, as long as it serves with the same configuration, its `shape`."""

    def __init__(
        self,
        client: InferenceServerClient,
        files: LocalFiles,
        shape: ModelShape,
        pool: Executor,
        created_s: int,
    ) -> None:
        """Set up.

        Args:
            client: connected to the server.
            files: describe its checkpoint.
            shape: its configuration.
            pool: runs what would hold up the event loop.
            created_s: when it was found, in Unix time.
        """
        self.engine = shape.name
        self.has_token_ids = False
        self._client = client
        self.shape = shape
        self._pool = pool
        config = files.config
        self.max_model_len = min(
            each for each in (shape.max_model_len, config.max_position_embeddings) if each
        )
        self.info = Ready(
            checkpoint=Checkpoint(str(files.directory), shape.name),
            created_s=created_s,
            max_model_len=self.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=list(config.eos_token_ids),
            max_num_seqs=0,
            stats=EngineStats(),
        )
        self._loaded = _loaded(self.info, files, shape)

    async def loaded(self) -> LoadedCheckpoint:
        """See `Model`."""
        return self._loaded

    async def begin(
        self, loaded: LoadedCheckpoint, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, RemoteGeneration]:
        """See `Model`."""
        loop = asyncio.get_running_loop()
        asked, requests = await loop.run_in_executor(self._pool, self._read, loaded, read)
        return asked, RemoteGeneration(self._client, asked, requests)

    async def snapshot(self) -> NamedSnapshot:
        """See `Model`.

        Raises:
            APIError: always, as only the server with the engine can ask it.
        """
        message = f"What the engine of `{self.engine}` does can not be seen in front of a remote server."
        raise APIError(404, message)

    def report(self, batch: ObservationBatch) -> None:
        """See `Model`: nothing is observed."""

    def _read(
        self, loaded: LoadedCheckpoint, read: Callable[[RequestReader], AskedGeneration]
    ) -> tuple[AskedGeneration, list[Mapping[str, Any]]]:
        asked = read(loaded.reader)
        check_owner(asked)
        request = asked.request
        timeout_us = None if request.timeout_s is None else max(1, round(request.timeout_s * 1e6))
        return asked, [
            {
                "model_name": self.engine,
                "inputs": row_inputs(asked, row, self.shape, loaded.reader.encoder),
                "request_id": f"{request.request_id}/{row}" if row else request.request_id,
                "timeout": timeout_us,
            }
            for row in range(len(request.rows))
        ]


def _loaded(info: Ready, files: LocalFiles, shape: ModelShape) -> LoadedCheckpoint:
    limits = ModelLimits(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        exclude_input_in_output=True,
    )
    encoder = PromptEncoder(
        files.tokenizer,
        info.max_model_len,
        info.vocab_size,
        add_special_tokens=shape.adds_special_tokens,
        skip_special_tokens=shape.skips_special_tokens,
    )
    refusals = remote_refusals(skips_special_tokens=shape.skips_special_tokens)
    reader = RequestReader(encoder, limits, files.grammar, refusals)
    return LoadedCheckpoint(info, files.tokenizer, reader, ChunkTexts(files.tokenizer.table))


def _visible(grammar: OutputGrammar, tokenizer: Tokenizer) -> OutputGrammar:
    """The parts of the grammar whose marks are part of the text, as their tokens do not come."""
    hidden = {mark for token_id, mark in grammar.marks.items() if token_id in tokenizer.table.special_ids}
    reasoning, calls = grammar.reasoning, grammar.calls
    if reasoning is not None and hidden & {reasoning.reasoning.begin, reasoning.reasoning.end}:
        reasoning = None
    if calls is not None and hidden.intersection(calls.marks):
        calls = None
    return OutputGrammar(reasoning, calls)
