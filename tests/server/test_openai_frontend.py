"""Sends the tensors that Triton's OpenAI frontend sends, and reads the answers as it does.

The frontend uses all models except vLLM's in this way.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.raw_grpc import Outcome, ask
from helpers.server import Server

PROMPT = "The quick"
# Models whose texts do not include the prompt, as chats require.
FRONTENDS = {
    "naiad": ("chat_ensemble", "chat_text"),
    "trtllm": ("excluding_ensemble", "excluding_tensorrt_llm_bls"),
}


def chat(server: Server, model: str, *, is_streaming: bool) -> Outcome:
    """Send a request of its chat endpoint, which never sends exclude_input_in_output."""
    inputs = {
        "text_input": np.array([[PROMPT.encode()]], dtype=np.object_),
        "stream": np.bool_([[is_streaming]]),
        "max_tokens": np.int32([[24]]),
        "stop_words": np.array([[b"never said", b"nor this"]], dtype=np.object_),
        "top_p": np.float32([[1.0]]),
        "frequency_penalty": np.float32([[0.5]]),
        "presence_penalty": np.float32([[0.25]]),
        "seed": np.uint64([[2**63 - 1]]),
        "temperature": np.float32([[0.7]]),
        "return_num_input_tokens": np.bool_([[True]]),
        "return_num_output_tokens": np.bool_([[True]]),
    }
    outcome = ask(server.grpc, model, inputs)
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    # It reads one string from each response, and 32-bit token counts.
    for response in outcome.responses:
        assert response["text_output"].size == 1
        assert {response[f"num_{kind}_tokens"].dtype for kind in ("input", "output")} == {np.dtype("int32")}
    return outcome


def usage(outcome: Outcome) -> tuple[int, int]:
    """The number of prompt tokens in the first response, and the sum of the new tokens."""
    first = outcome.responses[0]["num_input_tokens"].item()
    return first, sum(each["num_output_tokens"].item() for each in outcome.responses)


@pytest.mark.parametrize("preset", FRONTENDS)
def test_a_chat_is_the_same_streamed_and_whole(presets: Server, preset: str) -> None:
    texts = set()
    for model in FRONTENDS[preset]:
        whole = chat(presets, model, is_streaming=False)
        assert len(whole.responses) == 1
        streamed = chat(presets, model, is_streaming=True)
        assert (streamed.text, usage(streamed)) == (whole.text, usage(whole))
        texts.add((whole.text, usage(whole)))
    # Both models give the same texts.
    assert len(texts) == 1
    assert not texts.pop()[0].startswith(PROMPT)
