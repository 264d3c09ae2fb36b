"""The `llm` model on `fast_engine`, with and without coalescing of late tokens."""

from __future__ import annotations

from typing import Any

from perf.server.each_token_row import EachTokenRow

from naiad.engine_process.clients import engine_client
from naiad.triton_server.models.llm import LLMModel
from naiad.triton_server.service import llm_service


def fast_llm_model(tokens_per_s: float, *, coalesces: bool) -> type[LLMModel]:
    """Make the `llm` model with this engine, for the model.py of a repository.

    Args:
        tokens_per_s: the rate of all sequences together.
        coalesces: whether late tokens share responses, as in service.
    """
    # Replaced where they are used, not where they are defined.
    client: Any = engine_client
    service: Any = llm_service
    command = [
        *client.default_command()[:1],
        "-m",
        "perf.server.fast_engine",
        "--tokens-per-s",
        str(tokens_per_s),
    ]
    client.default_command = lambda: command
    if not coalesces:
        service.StreamRow = EachTokenRow
    return LLMModel
