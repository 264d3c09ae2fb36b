"""Models of every preset that the compatibility page describes, and values to send them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.contract_page import Row, page_rows
from naiad.tokenization import pack_word_list

MESSAGES = json.dumps([{"role": "user", "content": "Hello"}])
VOCABULARY = 401


@dataclass(frozen=True)
class Model:
    """A model of the server, and the section of the page that describes it."""

    name: str
    section: str
    is_decoupled: bool = True

    @property
    def rows(self) -> list[Row]:
        return page_rows(self.section) + (page_rows("ensemble") if self.section == "text" else [])

    @property
    def inputs(self) -> list[Row]:
        return [row for row in self.rows if not row.is_output]

    @property
    def has_rows(self) -> bool:
        return self.section != "vllm_model"

    def base(self) -> dict[str, Any]:
        """The smallest request, by tensor name."""
        return {
            "tokenizer": {"QUERY": "Hello", "REQUEST_OUTPUT_LEN": 4},
            "llm": {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4},
            "vllm_model": {"text_input": "Hello"},
            "detokenizer": {},
        }.get(self.section, {"text_input": "Hello", "max_tokens": 4})

    def tensors(self, values: dict[str, Any]) -> dict[str, Any]:
        """Tensors of the types given on the page."""
        rows = {row.name: row for row in self.inputs}
        return {
            name: value if isinstance(value, np.ndarray) else rows[name].array(value, self.has_rows)
            for name, value in values.items()
        }


class Messages(Model):
    """A model that is sent messages instead of text."""

    def base(self) -> dict[str, Any]:
        return {name: value for name, value in super().base().items() if name not in ("text_input", "QUERY")}


# The models of three presets: Naiad's own, vLLM's, and TensorRT-LLM's unary ones, with the sections of the
# corresponding models of Naiad.
MODELS = [
    *(Model(name, name) for name in ("ensemble", "tokenizer", "llm", "text", "vllm_model")),
    Model("unary_ensemble", "ensemble", is_decoupled=False),
    Model("unary_preprocessing", "tokenizer", is_decoupled=False),
    Model("unary_tensorrt_llm", "llm", is_decoupled=False),
    Model("unary_tensorrt_llm_bls", "text", is_decoupled=False),
]

WORDS = {"bad_words": ["e", " qu"], "stop_words": ["stop"], "embedding_bias_words": ["e"]}
# Values for inputs for which one or true will not do; inputs that belong together are sent together.
VALUES: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in WORDS.items()},
    "text_input": {"text_input": "The quick"},
    "messages": {"messages": MESSAGES},
    "QUERY": {"QUERY": "The quick"},
    "BAD_WORDS_DICT": {"BAD_WORDS_DICT": WORDS["bad_words"]},
    "STOP_WORDS_DICT": {"STOP_WORDS_DICT": WORDS["stop_words"]},
    "embedding_bias_words": {"embedding_bias_words": ["e"], "embedding_bias_weights": [1.5]},
    "EMBEDDING_BIAS_WORDS": {"EMBEDDING_BIAS_WORDS": ["e"], "EMBEDDING_BIAS_WEIGHTS": [1.5]},
    "logit_bias_ids": {"logit_bias_ids": [5, 6], "logit_bias_values": [1.5, -1.5]},
    "stop_words_list": {"stop_words_list": pack_word_list([[7, 8]])[None]},
    "bad_words_list": {"bad_words_list": pack_word_list([[7, 8]])[None]},
    "embedding_bias": {"embedding_bias": np.zeros((1, VOCABULARY), dtype=np.float32)},
    "input_ids": {"input_ids": [9, 8, 7]},
    "input_lengths": {"input_lengths": 3},
    "length_penalty": {"length_penalty": 0.5, "beam_width": 2},
    "len_penalty": {"len_penalty": 0.5, "beam_width": 2},
    "early_stopping": {"early_stopping": False},
    "beam_search_diversity_rate": {"beam_search_diversity_rate": 0.5, "beam_width": 2},
    "runtime_top_p_decay": {"runtime_top_p_decay": 0.5, "runtime_top_p": 0.9},
    "top_p_decay": {"top_p_decay": 0.5, "top_p": 0.9},
    "beam_width": {"beam_width": 2},
    "guided_decoding_guide_type": {"guided_decoding_guide_type": "json"},
    "guided_decoding_guide": {
        "guided_decoding_guide": "[a-z ]+",
        "guided_decoding_guide_type": "regex",
    },
    "top_p": {"top_p": 0.5},
    "runtime_top_p": {"runtime_top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "min_tokens": {"min_tokens": 2},
    "min_length": {"min_length": 2},
    "stop_token_ids": {"stop_token_ids": [7, 8]},
    "allowed_token_ids": {"allowed_token_ids": [7, 8]},
    "draft_input_ids": {"draft_input_ids": [7, 8]},
    "cache_salt": {"cache_salt": "tenant"},
    "sampling_parameters": {"sampling_parameters": '{"temperature": "0.5", "n": 2, "stop": ["e"]}'},
}
RANGES = {"starts": [0, 2], "ends": [2, -1], "priorities": [90, 10], "durations_ms": [1000, -1]}
RANGES = {f"retention_token_range_{name}": values for name, values in RANGES.items()}
VALUES["retention_token_range_starts"] = RANGES
PAIRED = {"embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS", "logit_bias_values", *list(RANGES)[1:]}
# Not sent by these tests: the first is made by the tokenizer, the second ends other requests.
INTERNAL = {"text_context", "stop"}
