"""A server with models of several presets, and calls for clients without streams."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from helpers.raw_grpc import as_tensor, ask
from helpers.server import Server
from helpers.tiny_repository import add_to_repository, create_repository, tiny_checkpoint
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer

Tensors = dict[str, Any]
PAD_TOKEN = "<|im_end|>"


def write_presets(folder: Path, *options: str) -> Path:
    """Write Naiad's own models with `vllm_model`, and TensorRT-LLM's as `unary_…`, with a tiny engine each.

    Args:
        folder: where to write the checkpoint and the repository.
        options: options of both engines.

    Returns:
        The repository.
    """
    checkpoint, repository = tiny_checkpoint(folder / "checkpoint"), folder / "repository"
    create_repository(repository, checkpoint, *options)
    create_repository(folder / "vllm", checkpoint, "--preset", "vllm")
    shutil.copytree(folder / "vllm" / "vllm_model", repository / "vllm_model")
    add_to_repository(repository, checkpoint, "unary", "--preset", "trtllm", "--no-decoupled", *options)
    return repository


def add_padded(repository: Path) -> None:
    """Add TensorRT-LLM's streaming models as `classic_…`, whose checkpoint has a separate padding token."""
    checkpoint = tiny_checkpoint(repository.parent / "padded")
    write_tokenizer(checkpoint, byte_level_tokenizer(), pad_token=PAD_TOKEN)
    add_to_repository(repository, checkpoint, "classic", "--preset", "trtllm")


def add_excluding(repository: Path) -> None:
    """Add models with `exclude_input_in_output` in their configuration.

    Naiad's own are called `chat_…`, TensorRT-LLM's `excluding_…`.
    """
    for name, preset, models in (
        ("chat", "naiad", ("llm", "text")),
        ("excluding", "trtllm", ("tensorrt_llm", "tensorrt_llm_bls")),
    ):
        add_to_repository(repository, repository.parent / "checkpoint", name, "--preset", preset)
        for model in models:
            config = repository / f"{name}_{model}" / "config.pbtxt"
            text = config.read_text()
            default = 'key: "exclude_input_in_output" value: { string_value: "false"'
            assert default in text
            config.write_text(text.replace(default, default.replace("false", "true")))


def infer(server: Server, model: str, inputs: Tensors, **request: Any) -> Tensors:
    """Make a unary gRPC call; return its outputs."""
    tensors = []
    for name, value in inputs.items():
        array = as_tensor(value)
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    with triton.InferenceServerClient(server.grpc) as client:
        result = client.infer(model, tensors, **request)
        return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}


def stream(server: Server, model: str, inputs: Tensors) -> Tensors:
    """Send a request over a gRPC stream; return the outputs of its one response."""
    outcome = ask(server.grpc, model, inputs)
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, "")
    (response,) = outcome.responses
    return dict(response)
