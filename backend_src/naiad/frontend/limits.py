"""Limits of a request that no single field's row defines, and the limits of a model."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_BYTES_PER_TOKEN = 64
# One year.
MAX_TIMEOUT_US = 365 * 24 * 3600 * 10**6
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the engine, and the defaults of a model's requests."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    exclude_input_in_output: bool
    forwarded_headers: str = ""
    is_decoupled: bool = True
