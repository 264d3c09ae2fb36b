"""For each model of the presets an invalid request and a part of its error message."""

from __future__ import annotations

import numpy as np

from helpers.preset_server import Tensors
from helpers.raw_grpc import llm_inputs, text_inputs

TEXT = np.array([[b"x"]], dtype=np.object_)
VLLM_TEXT = np.array([b"x"], dtype=np.object_)
BAD: dict[str, tuple[Tensors, str]] = {
    "llm": (llm_inputs([5], 0), "request_output_len = 0"),
    "text": (text_inputs("x", 4, top_p=2.0), "top_p = 2.0"),
    "ensemble": (text_inputs("x", 4, num_return_sequences=99), "num_return_sequences = 99"),
    "vllm_model": (
        {"text_input": VLLM_TEXT, "sampling_parameters": np.array([b'{"n": 0}'], dtype=np.object_)},
        "Error generating stream: ",
    ),
    "tokenizer": ({"QUERY": TEXT}, "max_tokens is missing"),
    "detokenizer": (
        {"TOKENS_BATCH": np.array([[[-5]]], dtype=np.int32), "SEQUENCE_LENGTH": 1},
        "token id -5",
    ),
    "unary_preprocessing": ({"REQUEST_OUTPUT_LEN": 4}, "expected either text_input or messages"),
    "unary_tensorrt_llm": ({"input_ids": [4000], "input_lengths": 1, "request_output_len": 4}, "4000"),
    "unary_postprocessing": (
        {"TOKENS_BATCH": np.array([[[5]]], dtype=np.int32), "SEQUENCE_LENGTH": [1, 1]},
        "SEQUENCE_LENGTH has 2 values for 1 rows",
    ),
    "unary_ensemble": ({"text_input": TEXT, "max_tokens": 0}, "max_tokens = 0"),
    "unary_tensorrt_llm_bls": ({"text_input": TEXT, "max_tokens": 4, "beam_width": 99}, "beam_width = 99"),
}
