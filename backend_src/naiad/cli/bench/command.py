"""`naiad bench throughput`: measures the engine alone, in this process, on random tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.config.engine_config import DEVICES, DTYPES
from naiad.errors import ConfigError, StartupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `naiad bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="throughput")
    throughput = kinds.add_parser("throughput", help="tokens per second of the engine alone")
    throughput.add_argument(
        "--batch", type=_counts, default=[1, 8, 32], metavar="N,…", help="sequences at the same time"
    )
    throughput.add_argument(
        "--prompt-tokens", type=at_least(1), default=128, metavar="N", help="of each sequence"
    )
    throughput.add_argument(
        "--output-tokens", type=at_least(1), default=128, metavar="N", help="of each sequence"
    )
    throughput.add_argument(
        "--repeats", type=at_least(1), default=3, metavar="N", help="the median is reported"
    )
    throughput.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    throughput.add_argument("--dtype", choices=DTYPES, default="auto")
    throughput.add_argument("--device", choices=DEVICES, default="cpu")
    throughput.add_argument("--block-size", type=int, default=64, metavar="TOKENS")
    throughput.add_argument("--kv-cache-bytes", type=int, default=0, metavar="BYTES", help="0: chosen")
    throughput.add_argument("--max-num-batched-tokens", type=int, default=0, metavar="N", help="0: measured")
    throughput.add_argument("--json", action="store_true", help="one JSON line for each batch")


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Returns:
        0.

    Raises:
        StartupError: the configuration, the checkpoint or the machine is not suitable, or the engine
            generates wrong tokens.
    """
    if args.output_tokens < 2:
        raise ConfigError("--output-tokens", args.output_tokens, "at least 2, else nothing is decoded")
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)),
        dtype=args.dtype,
        device=args.device,
        max_num_seqs=max(args.batch),
        block_size=args.block_size,
        kv_cache_bytes=args.kv_cache_bytes,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    _measure_batches(config, args)
    return 0


def _measure_batches(config: EngineConfig, args: argparse.Namespace) -> None:
    # torch takes seconds to import, and the other commands do not need it.
    from naiad.cli.bench import throughput

    engine, dtype = throughput.load_engine(config)
    generate = throughput.engine_generate(engine)
    vocab_size = engine.model_config.vocab_size
    for batch in args.batch:
        work = throughput.Work(batch, args.prompt_tokens, args.output_tokens)
        make_prompts = partial(throughput.random_prompts, work, vocab_size)
        same = throughput.check(generate, make_prompts(-1))
        if dtype == "float32" and not same:
            raise StartupError(f"batch = {batch}: a prompt gives other tokens than alone; no speed is shown")
        timing = throughput.measure({"engine": generate}, make_prompts, work, args.repeats)["engine"]
        report = {
            **throughput.figures(timing),
            "dtype": dtype,
            "device": args.device,
            "is_same_alone_and_in_batch": same,
            "repeats": args.repeats,
            "machine": throughput.machine(),
        }
        print(json.dumps(report) if args.json else throughput.sentence(timing, dtype), flush=True)


def _counts(text: str) -> Sequence[int]:
    try:
        return [at_least(1)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        expected = "expected whole numbers ≥ 1 with commas between them, as in 1,8,32"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from None
