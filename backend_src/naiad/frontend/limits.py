"""What one request may ask for at most. Beyond each number the request is refused with it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_BYTES_PER_TOKEN = 64
MAX_WORD_BYTES = 256
MAX_STOP_WORDS = 64
MAX_STOP_WORD_TOKENS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 1024
# Each bad word of the text level is banned with and without a space before it.
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 512
MAX_BIASED_IDS = 1024
MAX_OFFERED_TOKENS = 4096
MAX_BIAS = 1000.0
MAX_LOG_PROBS = 20
MAX_RETURN_SEQUENCES = 16
MAX_LENGTH_PENALTY = 10
MAX_DIVERSITY_RATE = 100.0
MAX_PRIORITY = 100
MAX_RETENTION_RANGES = 64
MAX_CACHE_SALT_BYTES = 256
# A year.
MAX_TIMEOUT_US = 365 * 24 * 3600 * 10**6
MAX_LOGITS_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine serves, and this model's defaults."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    exclude_input_in_output: bool
    forwarded_headers: str = ""
    is_decoupled: bool = True
