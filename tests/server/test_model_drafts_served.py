"""Servers that draft with a model give the same tokens; an incompatible draft model is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.drafting_engines import write_first_layers
from helpers.served import served
from helpers.server import Leaving, Server, eventually, run_serve, start_server
from helpers.tiny_repository import tiny_checkpoint

# A token that is generated nowhere else.
POISON = "<tool → call>"
PROMPT = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"
# With native kernels a step of such a small model is too fast for drafts to pay off.
SETTINGS = ("--dtype", "float32", "--num-speculative-tokens", "4", "--cpu-kernels", "torch")


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with enough layers for drafts by its first layer to pay off; it never generates POISON."""
    made = tiny_checkpoint(tmp_path_factory.mktemp("deep") / "checkpoint", num_layers=24)
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"][poison_id(made)] = 0
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def draft_dir(deep_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's first layer, with NaN as the embedding of POISON."""
    made = write_first_layers(deep_dir, tmp_path_factory.mktemp("draft") / "model", 1)
    tensors = load_file(made / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison_id(made)] = torch.nan
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def poison_id(folder: Path) -> int:
    (token_id,) = transformers.AutoTokenizer.from_pretrained(folder)(POISON)["input_ids"]
    return int(token_id)


@pytest.fixture(scope="module", params=["draft_model", "self"])
def drafting(
    request: pytest.FixtureRequest, deep_dir: Path, draft_dir: Path, leaving: Leaving
) -> Iterator[Server]:
    options = {
        "draft_model": ("--drafter", "draft_model", "--draft-model", str(draft_dir)),
        "self": ("--drafter", "self", "--num-draft-layers", "1"),
    }
    running = start_server(deep_dir, *SETTINGS, *options[request.param])
    yield running
    leaving.take(running)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_tokens_are_those_without_drafts(drafting: Server, sampling: dict[str, float]) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, **sampling}
    plain = served(drafting, "grpc", PROMPT, num_draft_tokens=0, **fields)
    drafted = served(drafting, "grpc", PROMPT, num_draft_tokens=4, **fields)
    assert drafted.text == plain.text
    assert plain.all("total_draft_tokens") == []
    assert drafted.end("total_draft_tokens") > 0
    eventually(lambda: drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0)
    assert drafting.settled("naiad_draft_failures_total") == 0


def test_a_draft_model_that_fails_for_a_text_costs_its_drafts_only(drafting: Server) -> None:
    before = drafting.settled("naiad_draft_failures_total")
    fields = {"max_tokens": 20, "ignore_eos": True}
    prompt = f"{POISON} and {PROMPT}"
    plain = served(drafting, "grpc", prompt, num_draft_tokens=0, **fields)
    assert served(drafting, "grpc", prompt, **fields).text == plain.text
    num_failures = drafting.settled("naiad_draft_failures_total") - before
    assert num_failures == ("--draft-model" in str(drafting.process.args))


def test_a_draft_model_that_does_not_fit_is_refused(default_model_dir: Path, tmp_path: Path) -> None:
    draft_dir = tiny_checkpoint(tmp_path / "draft")
    options = ("--model", str(default_model_dir), "--drafter", "draft_model", "--draft-model", str(draft_dir))
    code, said = run_serve(["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *options])
    assert code != 0
    assert f"draft_model = '{draft_dir}': expected a model" in said


def test_a_draft_model_that_is_not_there_is_refused(default_model_dir: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    options = ("--model", str(default_model_dir), "--drafter", "draft_model", "--draft-model", str(nowhere))
    code, said = run_serve(["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *options])
    assert code != 0
    assert f"--draft-model {nowhere}: no such directory" in said
