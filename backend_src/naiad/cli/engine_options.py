"""The engine's settings as options of `naiad serve` and `naiad repository`."""

from __future__ import annotations

import argparse

from naiad.cli.argument_types import absolute_path, at_least, num_bytes, some_text
from naiad.config.engine_config import (
    CPU_KERNELS,
    DEVICES,
    DRAFT_QUANTIZATIONS,
    DRAFTERS,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    field_names,
)
from naiad.config.model_location import text_of_path

MODEL_HELP = (
    "default (SmolLM2-135M-Instruct), a directory, a .gguf file, or org/name[@revision] of the Hugging Face "
    "hub"
)


def chosen_parameters(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings that were given as options, as text for config.pbtxt."""
    names = [name for name in field_names() if name != "model_dir"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {name: text_of_path(str(value), name) for name, value in given.items()}


def add_engine_arguments(
    parser: argparse.ArgumentParser, description: str, *, has_served_name: bool = True
) -> None:
    """Declare an option for each setting of the engine except the model.

    Args:
        parser: gets the options.
        description: what they do.
        has_served_name: whether the served name is one of them; otherwise the command has its own.
    """
    engine = parser.add_argument_group("engine", description)
    add = engine.add_argument
    if has_served_name:
        add(
            "--served-name",
            type=some_text,
            metavar="NAME",
            help="the model's name for clients of the OpenAI API (default: the checkpoint's name)",
        )
    else:
        parser.set_defaults(served_name=None)
    add(
        "--dtype",
        choices=DTYPES,
        help="data type of weights and computation; auto: bfloat16 if the device computes in it, "
        "else float32",
    )
    add("--device", choices=DEVICES, help="where the model runs")
    add(
        "--cpu-kernels",
        choices=CPU_KERNELS,
        help="what computes a step on a CPU: kernels compiled for this machine, or torch; auto: the former "
        "where a wheel brings them or there is a C++ compiler",
    )
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="how weights are rounded at load; int8: to eight bits, near the full weights; int4: to four "
        "bits, the smallest and the least exact; fp8: to float8_e4m3fn, on a GPU from sm_90 on",
    )
    add(
        "--start-cache",
        choices=("true", "false"),
        help="on a CPU: keep packed weights and measured costs in .naiad beside the model for the next start",
    )
    add(
        "--large-pages",
        choices=("true", "false"),
        help="on a CPU: move weights into pages of 2 MiB, which are read faster; false: engines of the same "
        "model share the start cache's",
    )
    add(
        "--tensor-parallel-size",
        type=at_least(1),
        metavar="N",
        help="number of processes that share the model, on CUDA each with a GPU of its own",
    )
    add(
        "--pipeline-parallel-size",
        type=at_least(1),
        metavar="N",
        help="number of stages that share the layers of the model; each is --tensor-parallel-size processes",
    )
    add(
        "--cpu-threads",
        type=at_least(0),
        metavar="N",
        help="threads that compute a step on a CPU; 0: one for each physical core that the process may use",
    )
    add(
        "--cpu-affinity",
        metavar="CORES",
        help="cores that the native kernels' threads are pinned to, one each, such as 0,2-3",
    )
    add(
        "--max-num-seqs",
        type=at_least(0),
        metavar="N",
        help="maximum number of sequences that run at the same time",
    )
    add(
        "--max-num-batched-tokens",
        type=at_least(0),
        metavar="N",
        help="maximum number of tokens that a step computes; 0: measured at start so that a step on a CPU "
        "stays under 250 ms",
    )
    add(
        "--max-model-len",
        type=at_least(0),
        metavar="N",
        help="maximum number of prompt and output tokens of a sequence; 0: the checkpoint's limit",
    )
    add("--block-size", type=at_least(0), metavar="N", help="tokens of a KV cache block: 16, 32, 64 or 128")
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="data type of the KV cache; auto: that of the computation; int8, fp8: eight bits with a "
        "measured scale for each token and KV head, for nearly twice the tokens in the same memory",
    )
    add(
        "--kv-cache-bytes",
        type=num_bytes,
        metavar="N",
        help="size of the KV cache; 0: chosen at start by the memory that is free",
    )
    add(
        "--kv-cache-memory-fraction",
        type=float,
        metavar="F",
        help="fraction of a GPU's memory that may be used, 0 < F ≤ 1; the KV cache gets what the weights and "
        "the largest step leave of it, unless --kv-cache-bytes sets its size",
    )
    add(
        "--cuda-graphs",
        choices=("true", "false"),
        help="on CUDA: capture steps of few tokens as graphs at start, and replay them",
    )
    add(
        "--batch-invariant",
        choices=("true", "false"),
        help="make a request's logits bitwise equal in any batch: slower on CUDA; on a CPU native kernels "
        "always do",
    )
    add(
        "--overlap-steps",
        choices=("true", "false"),
        help="on CUDA: launch a step before the last one's ids are on the host, if it does not need them",
    )
    add(
        "--enable-prefix-caching",
        choices=("true", "false"),
        help="reuse the KV cache of earlier prompts and outputs",
    )
    add(
        "--usage-file",
        type=absolute_path,
        metavar="FILE",
        help="append what each tenant uses every few seconds, for `naiad report`; only you may read it",
    )
    _add_queue(engine)
    _add_speculation(engine)
    _add_kv_events(engine)


def _add_queue(engine: argparse._ArgumentGroup) -> None:
    add = engine.add_argument
    add(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        help="which of a tenant's requests goes first: that with the smallest priority value, the first to "
        "arrive, or the one with the shortest prompt",
    )
    add(
        "--priority-aging-ms",
        type=at_least(0),
        metavar="N",
        help="waiting time that makes up for one unit of priority, or for a hundred prompt tokens",
    )
    add(
        "--max-queued-requests",
        type=at_least(0),
        metavar="N",
        help="maximum number of sequences that wait; further ones are refused with UNAVAILABLE",
    )
    add(
        "--max-queued-tokens",
        type=at_least(0),
        metavar="N",
        help="maximum number of prompt tokens that wait; 0: no limit",
    )
    add(
        "--target-first-token-ms",
        type=at_least(0),
        metavar="N",
        help="refuse a request at once if its first token is expected later, or after its own deadline; "
        "0: refuse none for that",
    )


def _add_speculation(engine: argparse._ArgumentGroup) -> None:
    add = engine.add_argument
    add(
        "--drafter",
        choices=DRAFTERS,
        help="where draft tokens come from; one step verifies several of them: the text itself (ngram), "
        "the text and the tenant's earlier outputs (suffix), a smaller model (draft_model), or the model's "
        "own first layers (self); auto: suffix where native kernels compute the steps",
    )
    add(
        "--draft-model",
        type=some_text,
        metavar="NAME",
        help="for --drafter draft_model: a model with the same vocabulary, named as for --model",
    )
    add(
        "--draft-quantization",
        choices=DRAFT_QUANTIZATIONS,
        help="for --drafter draft_model: how its weights are rounded at load, as by --quantization; auto: as "
        "the target's",
    )
    add(
        "--num-draft-layers",
        type=at_least(0),
        metavar="N",
        help="for --drafter self: number of layers; 0: a quarter of them",
    )
    add(
        "--num-speculative-tokens",
        type=at_least(0),
        metavar="K",
        help="maximum number of draft tokens of a sequence in a step, 1 … 16",
    )
    add(
        "--max-shared-draft-tokens",
        type=at_least(0),
        metavar="N",
        help="for suffix: maximum tokens of ended outputs kept for drafts, about 100 bytes each; 0: none",
    )


def _add_kv_events(engine: argparse._ArgumentGroup) -> None:
    add = engine.add_argument
    add(
        "--kv-events-endpoint",
        type=some_text,
        metavar="ENDPOINT",
        help="where routers subscribe to the prefix cache's changes (ZeroMQ, vLLM's messages): a port of the "
        "loopback address, or tcp://ADDRESS:PORT; anyone who can reach it can read them",
    )
    add(
        "--kv-events-replay-endpoint",
        type=some_text,
        metavar="ENDPOINT",
        help="with --kv-events-endpoint: where they ask for changes that they have missed",
    )
    add(
        "--kv-events-topic",
        type=some_text,
        metavar="TEXT",
        help="with --kv-events-endpoint: the topic that every message begins with, such as kv@POD@MODEL",
    )
    add(
        "--kv-events-token-ids",
        choices=("true", "false"),
        help="with --kv-events-endpoint: publish the tokens of prompts and outputs too, which most routers "
        "need; blocks with a cache_salt are then left out",
    )
