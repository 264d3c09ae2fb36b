"""A repository as `naiad repository` wrote it in November 2026 is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.preset_server import stream
from helpers.raw_grpc import ask, text_inputs
from helpers.server import Leaving, running
from helpers.tiny_repository import tiny_checkpoint

WRITTEN = Path(__file__).parent / "repository_of_2026_11"
PROMPT = "The quick brown"


def strings(text: str) -> Any:
    return np.array([text.encode()], dtype=np.object_)


@pytest.mark.parametrize("newer", ["", "llm"])
def test_each_of_its_models_serves_a_request(tmp_path: Path, leaving: Leaving, newer: str) -> None:
    """`llm` has an output since that its ensemble may not know."""
    checkpoint, repository = tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "repository"
    shutil.copytree(WRITTEN, repository)
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text().replace("CHECKPOINT", str(checkpoint))
        if config.parent.name == newer:
            text += 'output [{ name: "text_chunk", data_type: TYPE_INT64, dims: [-1] }]\n'
        config.write_text(text)
    sampling = json.dumps({"max_tokens": 8, "temperature": 0, "ignore_eos": True})
    with running(leaving, repository) as server:
        fields = text_inputs(PROMPT, 8, stream=False, exclude_input_in_output=False, ignore_eos=True)
        texts = [stream(server, model, fields)["text_output"].item() for model in ("ensemble", "text")]
        written = {"text_input": strings(PROMPT), "sampling_parameters": strings(sampling)}
        texts.append(stream(server, "vllm_model", written)["text_output"].item())
        assert texts[0].startswith(PROMPT.encode())
        assert len(set(texts)) == 1
        whole, streamed = (
            ask(server.grpc, "ensemble", text_inputs(PROMPT, 500, ignore_eos=True, stream=stream))
            for stream in (False, True)
        )
        assert streamed.text == whole.text
        # More than the last chunk, which comes in the older form anyway.
        assert len(streamed.responses) > len(whole.responses) == 1
