"""`preprocessing` → `tensorrt_llm` → `postprocessing`, called one by one as TensorRT-LLM's clients do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.preset_server import Tensors

Call = Callable[[str, Tensors], Tensors]
NAIAD_STEPS = ("tokenizer", "llm", "detokenizer")
TRTLLM_STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")

# TensorRT-LLM's backend has no text_context.
FROM_TOKENIZER = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "stop_words_list": "STOP_WORDS_IDS",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
}


def by_hand(call: Call, steps: tuple[str, ...], words: Tensors, more: Tensors) -> list[str]:
    """Call the three models; return the texts.

    Args:
        call: sends inputs to a model and returns its outputs.
        steps: names of the three models.
        words: inputs of the first model.
        more: further inputs of the second model.
    """
    first, second, last = steps
    tokenized = call(first, words)
    inputs: dict[str, Any] = {name: tokenized[outer] for name, outer in FROM_TOKENIZER.items()}
    made = call(second, inputs | more)
    batch = {"TOKENS_BATCH": made["output_ids"], "SEQUENCE_LENGTH": made["sequence_length"]}
    return texts(call(last, batch)["OUTPUT"])


def texts(output: Any) -> list[str]:
    """The texts of an output, which are str in JSON and bytes in the other protocols."""
    return [value if isinstance(value, str) else value.decode() for value in output.reshape(-1)]
