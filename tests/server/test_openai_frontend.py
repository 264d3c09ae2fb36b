"""What Triton's OpenAI frontend sends, tensor for tensor, and how it reads the answers.

It drives every model but vLLM's in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.raw_grpc import Outcome, ask
from helpers.server import Server, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint

PROMPT = "The quick"
DEFAULT = 'key: "exclude_input_in_output" value: { string_value: "false"'
DOORS = {"naiad": ("ensemble", "text"), "trtllm": ("ensemble", "tensorrt_llm_bls")}


@pytest.fixture(scope="module", params=DOORS)
def frontend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server whose texts do not hold the prompt, as a chat needs it, and its models for text."""
    folder = tmp_path_factory.mktemp(request.param)
    create_repository(
        folder / "repository", tiny_checkpoint(folder / "checkpoint"), "--preset", request.param
    )
    assert sum(exclude_prompts(config) for config in folder.glob("repository/*/config.pbtxt")) == 2
    running = start_repository("--model-repository", str(folder / "repository"))
    yield running, DOORS[request.param]
    assert running.stop() == 0, "\n".join(running.lines[-40:])


def exclude_prompts(config: Path) -> bool:
    text = config.read_text()
    config.write_text(text.replace(DEFAULT, DEFAULT.replace("false", "true")))
    return DEFAULT in text


def chat(server: Server, model: str, *, is_streaming: bool) -> Outcome:
    """One request of its chat endpoint, which never sends exclude_input_in_output."""
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
    # It takes one string from each, and the usage with 32 bits.
    for response in outcome.responses:
        assert response["text_output"].size == 1
        assert {response[f"num_{kind}_tokens"].dtype for kind in ("input", "output")} == {np.dtype("int32")}
    return outcome


def usage(outcome: Outcome) -> tuple[int, int]:
    """Prompt tokens as the first response says them, and the sum of the new ones."""
    first = outcome.responses[0]["num_input_tokens"].item()
    return first, sum(each["num_output_tokens"].item() for each in outcome.responses)


def test_a_chat_is_the_same_streamed_and_whole(frontend: tuple[Server, tuple[str, ...]]) -> None:
    server, models = frontend
    texts = set()
    for model in models:
        whole = chat(server, model, is_streaming=False)
        assert len(whole.responses) == 1
        streamed = chat(server, model, is_streaming=True)
        assert (streamed.text, usage(streamed)) == (whole.text, usage(whole))
        texts.add((whole.text, usage(whole)))
    # The two doors agree.
    assert len(texts) == 1
    assert not texts.pop()[0].startswith(PROMPT)
