"""Quantised checkpoints of several formats, served side by side by one server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import AWQ, GPTQ, SIZES
from helpers.quantised_checkpoints import Writer, awq, gptq, write_checkpoint
from helpers.raw_grpc import ask, llm_inputs
from helpers.server import Server, eventually, start_repository
from helpers.tiny_models import make_tiny_model
from helpers.tiny_repository import add_to_repository, create_repository
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer

PROMPT = [17, 5, 60, 33, 8, 91, 44]
TOKENS = 24
NAMES = ("first", "second", "third")


@dataclass
class Quantised:
    """A server of a GGUF file, a GPTQ checkpoint and one of AWQ; and what each model's weights make."""

    server: Server
    expected: dict[str, list[int]]


def greedy(model: Any) -> list[int]:
    """What transformers makes of the prompt with these weights."""
    ids = [*PROMPT]
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quantised]:
    folder = tmp_path_factory.mktemp("quantised")
    tokenizer = byte_level_tokenizer()
    sizes = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    expected: dict[str, list[int]] = {}

    def source(seed: int) -> tuple[Path, Any]:
        path = folder / f"source {seed}"
        return path, make_tiny_model(path, seed=seed, **sizes)

    _, model = source(1)
    gguf_file = folder / "model.gguf"
    model.load_state_dict(write_gguf(gguf_file, model, "Q4_0"), strict=False)
    expected["first"] = greedy(model)
    writers: dict[str, tuple[Writer, dict[str, Any]]] = {
        "second": (gptq(4, 32, sym=True), GPTQ),
        "third": (awq(32), AWQ),
    }
    for seed, (name, (writer, config)) in enumerate(writers.items(), start=2):
        path, model = source(seed)
        write_tokenizer(path, tokenizer)

        def writer_of(layer: str, writer: Writer = writer) -> Writer | None:
            return None if layer == "lm_head" else writer

        meant = write_checkpoint(path, folder / name, writer_of, config)
        model.load_state_dict(meant, strict=False)
        expected[name] = greedy(model)
    create_repository(folder / "repository", gguf_file)
    for name in writers:
        add_to_repository(folder / "repository", folder / name, name)
    server = start_repository("--model-repository", str(folder / "repository"))
    yield Quantised(server, expected)
    assert server.stop() == 0, "\n".join(server.lines[-40:])


def llm_of(name: str) -> str:
    """A repository's first model keeps the plain names."""
    return "llm" if name == "first" else f"{name}_llm"


@pytest.mark.parametrize("name", NAMES)
def test_each_makes_the_tokens_of_its_weights(quantised: Quantised, name: str) -> None:
    inputs = llm_inputs(PROMPT, TOKENS, ignore_eos=True)
    outcome = ask(quantised.server.grpc, llm_of(name), inputs)
    assert not outcome.errors
    assert outcome.num_finals == 1
    assert outcome.token_ids == quantised.expected[name]


def test_the_models_are_different(quantised: Quantised) -> None:
    assert len({tuple(ids) for ids in quantised.expected.values()}) == len(NAMES)


def test_each_model_has_its_own_memory_in_the_metrics(quantised: Quantised) -> None:
    server = quantised.server
    engines = server.processes("naiad.engine_process")
    assert len(engines) == len(NAMES)
    labels = {"memory_type": "cpu"}

    def are_told() -> bool:
        told = sorted(
            server.metric("nv_trt_llm_runtime_memory_metrics", model=llm_of(name), **labels) for name in NAMES
        )
        held = sorted(psutil.Process(each.pid).memory_info().rss for each in engines)
        return bool(np.allclose(told, held, rtol=0.05))

    for name in NAMES:
        ask(server.grpc, llm_of(name), llm_inputs(PROMPT, 4))
    eventually(are_told)
