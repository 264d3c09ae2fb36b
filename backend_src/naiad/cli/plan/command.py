"""`naiad plan`: replicas, latency and cost of a load, by a roofline or by steps measured on this CPU."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

from naiad.cli.argument_types import above_0, at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.plan.devices import DEVICES
from naiad.cli.plan.load import Limits, Load, latency, most_per_s
from naiad.cli.plan.steps import ModelSize, Roofline, StepCosts
from naiad.config import EngineConfig, ModelConfig
from naiad.config.engine_config import CPU_QUANTIZATIONS, DTYPES
from naiad.errors import ConfigError

_GIB = 1 << 30
# What weights and KV cache leave of a GPU's memory for activations and the rest.
_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine.

    Attributes:
        costs: of its steps.
        weight_bytes: of its weights.
        kv_bytes_per_token: of its KV cache.
        kv_cache_bytes: room for it.
    """

    costs: StepCosts
    weight_bytes: float
    kv_bytes_per_token: float
    kv_cache_bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", default="default", help="default, DIR, FILE.gguf or org/name[@revision]")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", choices=sorted(DEVICES), help="predict from the data sheet of this GPU")
    where.add_argument("--cpu", action="store_true", help="predict from steps that are measured on this CPU")
    add("--rate", type=above_0, required=True, metavar="R", help="requests a second")
    add("--prompt", type=at_least(1), required=True, metavar="N", help="tokens of a prompt")
    add("--output", type=at_least(2), required=True, metavar="N", help="tokens of an answer")
    add("--slo-ttft-ms", type=above_0, default=math.inf, metavar="MS", help="mean time to the first token")
    add("--slo-itl-ms", type=above_0, default=math.inf, metavar="MS", help="mean time between tokens")
    add("--max-num-seqs", type=at_least(1), default=0, metavar="N", help="default: 32 on a CPU, 256 on a GPU")
    add("--weight-bits", type=int, choices=(8, 16), default=16, help="of a GPU's weights and products")
    add("--kv-bits", type=int, choices=(8, 16), default=16, help="of a GPU's KV cache")
    add("--dtype", choices=DTYPES, default="auto", help="on a CPU")
    add("--quantization", choices=CPU_QUANTIZATIONS, default="none", help="on a CPU")
    add("--price-per-hour", type=above_0, metavar="P", help="of one replica, in any currency")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 1 if no number of replicas serves the load within the limits."""
    directory = str(resolve_model(args.model))
    config = ModelConfig.from_directory(directory)
    longest = args.prompt + args.output
    if longest > config.max_position_embeddings:
        expected = (
            f"at most {config.max_position_embeddings} tokens together with --output, the model's limit"
        )
        raise ConfigError("--prompt", args.prompt, expected)
    for key, value, usual in (("--dtype", args.dtype, "auto"), ("--quantization", args.quantization, "none")):
        if args.gpu and value != usual:
            raise ConfigError(key, value, f"{usual} with --gpu: --weight-bits says how wide its weights are")
    max_num_seqs = args.max_num_seqs or (32 if args.cpu else 256)
    replica = _cpu_replica(args, directory, max_num_seqs) if args.cpu else _gpu_replica(args, config)
    max_running = min(max_num_seqs, replica.kv_cache_bytes // (replica.kv_bytes_per_token * longest))
    if max_running < 1:
        raise ConfigError(
            "--prompt", args.prompt, "a request that fits into the KV cache together with --output"
        )
    plan = _plan(args, replica, max_running)
    if args.json:
        print(json.dumps(plan, indent=2))
    else:
        width = max(map(len, plan))
        for name, value in plan.items():
            print(f"{name.replace('_', ' '):{width}}  {'–' if value is None else value}")
    return 0 if plan["replicas"] else 1


def _plan(args: argparse.Namespace, replica: Replica, max_running: float) -> dict[str, float | None]:
    limits = Limits(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3)
    load = Load(args.rate, args.prompt, args.output)
    most = most_per_s(replica.costs, load, max_running, limits)
    num_replicas = math.ceil(args.rate / most) if most else 0
    share = Load(args.rate / max(1, num_replicas), args.prompt, args.output)
    found = latency(replica.costs, share, max_running) if num_replicas else None
    plan: dict[str, float | None] = {
        "weights_gib": round(replica.weight_bytes / _GIB, 2),
        "kv_cache_gib": round(replica.kv_cache_bytes / _GIB, 2),
        "most_sequences": int(max_running),
        "most_requests_per_s_of_a_replica": _rounded(most),
        "most_output_tokens_per_s_of_a_replica": _rounded(most * args.output),
        "replicas": num_replicas,
        "running_sequences": None if found is None else _rounded(found.running),
        "mean_time_to_first_token_ms": None if found is None else _rounded(1e3 * found.first_token_s),
        "mean_inter_token_ms": None if found is None else _rounded(1e3 * found.inter_token_s),
    }
    if args.price_per_hour:
        price = num_replicas * args.price_per_hour
        plan["price_per_hour"] = _rounded(price)
        tokens_per_hour = args.rate * args.output * 3600
        plan["price_per_million_output_tokens"] = _rounded(price / tokens_per_hour * 1e6)
    return plan


def _gpu_replica(args: argparse.Namespace, config: ModelConfig) -> Replica:
    device = DEVICES[args.gpu]
    size = ModelSize.of(config, args.weight_bits, args.kv_bits)
    kv_cache_bytes = device.memory_bytes * _MEMORY_FRACTION - size.num_bytes
    if kv_cache_bytes <= 0:
        expected = (
            f"one with more than {size.num_bytes / _MEMORY_FRACTION / 1e9:.0f} GB, for the weights alone"
        )
        raise ConfigError("--gpu", args.gpu, expected)
    return Replica(Roofline(size, device, args.weight_bits), size.num_bytes, size.kv_bytes, kv_cache_bytes)


def _cpu_replica(args: argparse.Namespace, directory: str, max_num_seqs: int) -> Replica:
    # torch takes seconds to import.
    from naiad.cli.plan.measure import measured_costs

    config = EngineConfig(
        model_dir=directory, dtype=args.dtype, quantization=args.quantization, max_num_seqs=max_num_seqs
    )
    costs, runner = measured_costs(config, max_num_seqs)
    kv_bits = 8 * runner.dtype.itemsize
    weight_bits = {"int8": 8, "int4": 5}.get(args.quantization, kv_bits)
    size = ModelSize.of(ModelConfig.from_directory(directory), weight_bits, kv_bits)
    num_tokens = runner.num_blocks * config.block_size
    return Replica(costs, size.num_bytes, size.kv_bytes, num_tokens * size.kv_bytes)


def _rounded(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")
