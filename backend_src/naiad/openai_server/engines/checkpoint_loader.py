"""Reads the checkpoints of engines for the models of the OpenAI server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from naiad.config import ModelConfig
from naiad.engine_process.protocol import Ready
from naiad.file_identity import FileIdentity
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.api.parsing.output_parser import grammar_of
from naiad.openai_server.api.reading import RequestReader
from naiad.openai_server.engines.interface import LoadedCheckpoint
from naiad.tokenization import Tokenizer

# Beside those that models hold.
_MOST_TOKENIZERS = 4


class CheckpointLoader:
    """Reads in a thread of its own, one checkpoint after the other.

    The C library keeps what a thread has freed for that thread. A tokenizer takes tens of megabytes, so one
    thread reads them all, which has room for the next where an earlier one was. A part of it stays with the
    process all the same, and most engines that come were there before: they, or their server, are started
    again. So a tokenizer is read again only if its files have changed.
    """

    def __init__(self, families: FamilyChoices) -> None:
        """Set up; `families` says how the families are chosen that say how a model writes."""
        self._families = families
        self._thread = ThreadPoolExecutor(1, "openai-load")
        # Directory of a checkpoint → its files when they were read, and the tokenizer; the last used is last.
        self._tokenizers: OrderedDict[str, tuple[dict[Path, FileIdentity], Tokenizer]] = OrderedDict()

    async def load(self, info: Ready) -> LoadedCheckpoint:
        """Read the checkpoint of an engine that describes itself so.

        Raises:
            NaiadError: its files cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, info)

    def close(self) -> None:
        """Read no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, info: Ready) -> LoadedCheckpoint:
        return _checkpoint_of(info, self._tokenizer_of(info.checkpoint.model_dir), self._families)

    def _tokenizer_of(self, directory: str) -> Tokenizer:
        files = _identities_of(directory)
        kept = self._tokenizers.pop(directory, None)
        if not files or kept is None or kept[0] != files:
            # The next has room where this one was.
            kept = None
            kept = files, Tokenizer.from_directory(directory)
        self._tokenizers[directory] = kept
        while len(self._tokenizers) > _MOST_TOKENIZERS:
            self._tokenizers.popitem(last=False)
        return kept[1]


def _checkpoint_of(info: Ready, tokenizer: Tokenizer, families: FamilyChoices) -> LoadedCheckpoint:
    config = ModelConfig.from_directory(info.checkpoint.model_dir)
    limits = ModelLimits(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        exclude_input_in_output=True,
    )
    encoder = PromptEncoder(tokenizer, info.max_model_len, config.vocab_size)
    reader = RequestReader(encoder, limits, grammar_of(tokenizer, families))
    return LoadedCheckpoint(info, tokenizer, reader, ChunkTexts(tokenizer.table))


def _identities_of(directory: str) -> dict[Path, FileIdentity]:
    """The files of a checkpoint; none if they cannot be looked at."""
    path = Path(directory)
    try:
        return {each: FileIdentity.of(each) for each in (path.iterdir() if path.is_dir() else [path])}
    except OSError:
        # Whoever reads them says what is wrong.
        return {}
