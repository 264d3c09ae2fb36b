"""The suites that can be run: their folders, and what the tests find in the place of their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A suite.

    Attributes:
        name: its name on the command line.
        top: the folder under `tests` whose conftest files are the outermost that pytest reads.
        folders: what is run, under `top`.
        checkpoints: names of the Hugging Face hub that mean the served checkpoint in the tests' environment.
        environment: variables of the tests' environment; `{checkpoint}` is the checkpoint's directory.
        base_files: a regular expression of the files whose model continues texts, as a base model does.
        tool_files: a regular expression of the files whose model is shown tools.
        caches: folders of TMPDIR that tests take for caches of the hub.
    """

    name: str
    top: str
    folders: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    base_files: str = "$^"
    tool_files: str = "$^"
    caches: tuple[str, ...] = ()


_TRITON = Kind(
    name="triton",
    top=".",
    folders=(".",),
    environment={
        # The backend whose log-probabilities and sampling the tests expect.
        "TEST_BACKEND": "vllm",
        "TEST_MODEL": "llama-3.1-8b-instruct",
        "TEST_MODEL_REPOSITORY": "models",
        "TEST_TOKENIZER": "{checkpoint}",
    },
    base_files=r"/test_(completions|openai_client)\.py",
    tool_files=r"/test_tool_calling\.py",
)
_VLLM = Kind(
    name="vllm",
    top="entrypoints",
    folders=("openai/chat_completion", "openai/completion"),
    checkpoints=(
        "HuggingFaceH4/zephyr-7b-beta",
        "Qwen/Qwen2-1.5B-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen3-0.6B",
        "openai-community/gpt2",
        "typeof/zephyr-7b-beta-lora",
    ),
    base_files=r"openai/completion/",
    tool_files=r"_with_function_calling\.py",
    caches=("qwen3_06b",),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (_TRITON, _VLLM)}
