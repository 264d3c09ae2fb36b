"""An option for each setting of the engine, as `naiad serve` and `naiad repository` take them."""

from __future__ import annotations

import argparse

from naiad.cli.argument_types import at_least
from naiad.config.engine_config import DEVICES, DRAFTERS, DTYPES, SCHEDULING_POLICIES, field_names

MODEL_HELP = "default (SmolLM2-135M-Instruct), a directory, or org/name[@revision] of the Hugging Face hub"


def chosen_parameters(args: argparse.Namespace) -> dict[str, str]:
    """The parameters of config.pbtxt that were given as options, as text."""
    names = [name for name in field_names() if name != "model_dir"]
    return {name: str(value) for name in names if (value := getattr(args, name)) is not None}


def add_engine_arguments(parser: argparse.ArgumentParser, description: str) -> None:
    """Declare an option for each setting of the engine but the model."""
    engine = parser.add_argument_group("engine", description)
    add = engine.add_argument
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights, computation and KV cache; auto: bfloat16 where the device computes in it, "
        "else float32",
    )
    add("--device", choices=DEVICES, help="where the model runs")
    add("--max-num-seqs", type=at_least(0), metavar="N", help="sequences that run at the same time")
    add(
        "--max-num-batched-tokens",
        type=at_least(0),
        metavar="N",
        help="tokens that a step computes at most; 0: measured at start so that a step on a CPU "
        "stays under 250 ms",
    )
    add(
        "--max-model-len",
        type=at_least(0),
        metavar="N",
        help="prompt and output tokens of a sequence at most; 0: the checkpoint's limit",
    )
    add("--block-size", type=at_least(0), metavar="N", help="tokens of a KV cache block: 16, 32, 64 or 128")
    add(
        "--kv-cache-bytes",
        type=at_least(0),
        metavar="N",
        help="size of the KV cache; 0: chosen by the memory that is free at start",
    )
    add(
        "--kv-cache-memory-fraction",
        type=float,
        metavar="F",
        help="of a GPU's memory so much may be in use, 0 < F ≤ 1; the KV cache gets what weights and the "
        "largest step leave of it, unless --kv-cache-bytes says its size",
    )
    add(
        "--cuda-graphs",
        choices=("true", "false"),
        help="on CUDA: capture steps of few tokens at start and replay them",
    )
    add(
        "--batch-invariant",
        choices=("true", "false"),
        help="on CUDA: a request's logits are the same to the last bit in any batch; slower",
    )
    add(
        "--overlap-steps",
        choices=("true", "false"),
        help="on CUDA: launch a step before the host has the last one's ids, where nothing depends on them",
    )
    add(
        "--enable-prefix-caching",
        choices=("true", "false"),
        help="use the KV of earlier prompts and outputs again",
    )
    _add_queue(engine)
    _add_speculation(engine)


def _add_queue(engine: argparse._ArgumentGroup) -> None:
    add = engine.add_argument
    add(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        help="who of a tenant goes first: the smaller priority, who came first, or the shortest prompt",
    )
    add(
        "--priority-aging-ms",
        type=at_least(0),
        metavar="N",
        help="time of waiting that makes up for one unit of priority, or for a hundred prompt tokens",
    )
    add(
        "--max-queued-requests",
        type=at_least(0),
        metavar="N",
        help="sequences that may wait beside those that run; others are refused with UNAVAILABLE",
    )
    add("--max-queued-tokens", type=at_least(0), metavar="N", help="prompt tokens that may wait; 0: no bound")


def _add_speculation(engine: argparse._ArgumentGroup) -> None:
    add = engine.add_argument
    add(
        "--drafter",
        choices=DRAFTERS,
        help="what guesses next tokens, several of which are checked in one step: the text itself (ngram), "
        "it and the tenant's earlier outputs (suffix), a smaller model (draft_model), or the model's own "
        "first layers (self)",
    )
    add(
        "--draft-model",
        metavar="NAME",
        help="for --drafter draft_model: a model with the same tokens, named as for --model",
    )
    add(
        "--num-draft-layers",
        type=at_least(0),
        metavar="N",
        help="for --drafter self: so many layers; 0: a quarter of them",
    )
    add(
        "--num-speculative-tokens",
        type=at_least(0),
        metavar="K",
        help="draft tokens of a sequence in a step at most, 1 … 16",
    )
