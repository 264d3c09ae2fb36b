"""Measures what it costs to split a model over processes on a CPU, beside one process with the same kernels.

    python -m perf.engine.parallel --splits 2x1,3x1,1x2

A split is TENSORxPIPELINE: 2x1 halves every matrix, 1x2 halves the layers. Parts of a matrix are multiplied
by torch, so torch computes everything here; each process has one thread. More processes than cores share
these. All get the same prompts in turns. In float32 the greedy ids must be those of the one process, or no
speed is reported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from perf.common.report import print_table, write_results
from perf.engine.compare_transformers import num_same_prompts

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import (
    Generate,
    Prompts,
    Timing,
    Work,
    engine_generate,
    load_engine,
    measure,
    random_prompts,
)
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner

_ONE = "1x1"


def main() -> int:
    """Measure, print and write the results; return 1 if the tokens differ."""
    args = _parse()
    model_dir = resolve_model(args.model)
    batches = [int(part) for part in args.batch.split(",")]
    one = EngineConfig(
        model_dir=str(model_dir),
        dtype=args.dtype,
        max_num_seqs=max(batches),
        cpu_kernels="torch",
        enable_prefix_caching=False,
        drafter="none",
    )
    timings: dict[int, dict[str, Timing]] = {}
    with ExitStack() as stack:
        engines = {split: stack.enter_context(_engine(one, split)) for split in (_ONE, *args.splits)}
        contestants = {split: generate for split, (generate, _) in engines.items()}
        _, vocab_size = engines[_ONE]
        for batch in batches:
            work = Work(batch, args.prompt_tokens, args.output_tokens)
            make_prompts = partial(random_prompts, work, vocab_size)
            for split in args.splits:
                same = num_same_prompts(contestants[split], contestants[_ONE], make_prompts(-1))
                print(f"batch {batch}, {split}: {same} of {batch} prompts give the same tokens", flush=True)
                if args.dtype == "float32" and same < batch:
                    print("the greedy tokens differ in float32: no speed is reported", file=sys.stderr)
                    return 1
            timings[batch] = measure(contestants, make_prompts, work, args.repeats)
    print_table(timings, rival=_ONE)
    settings = vars(args) | {"model": model_dir.name, "splits": ",".join(args.splits)}
    print("written:", write_results("parallel", settings, timings))
    return 0


@contextmanager
def _engine(one: EngineConfig, split: str) -> Iterator[tuple[Generate, int]]:
    """An engine in a process of its own, which can be a rank of one split only, and its vocabulary's size."""
    tensor, pipeline = (int(part) for part in split.split("x"))
    num_ranks = tensor * pipeline
    config = replace(
        one,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        cpu_threads=num_ranks if num_ranks <= len(os.sched_getaffinity(0)) else 0,  # 0: at least one each
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(config, there))
    process.start()
    there.close()

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        here.send((prompts, num_tokens))
        made: list[list[int]] = here.recv()
        return made

    try:
        yield generate, here.recv()
    finally:
        here.close()
        process.join()


def _serve(config: EngineConfig, asks: Connection) -> None:
    engine, _ = load_engine(config)
    generate = engine_generate(engine)
    runner = engine._model_runner
    assert isinstance(runner, ModelRunner)
    asks.send(engine.model_config.vocab_size)
    try:
        with suppress(EOFError):
            while True:
                asks.send(generate(*asks.recv()))
    finally:
        runner.close()


def _splits(text: str) -> list[str]:
    splits = text.split(",")
    for split in splits:
        tensor, _, pipeline = split.partition("x")
        if not (tensor.isdecimal() and pipeline.isdecimal()) or split == _ONE:
            raise argparse.ArgumentTypeError(f"{split!r}: expected TENSORxPIPELINE, not {_ONE}")
    return splits


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--splits", type=_splits, default=["2x1", "3x1", "1x2"], metavar="TxP,…")
    parser.add_argument("--batch", default="1,8", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=32, metavar="N")
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N", help="turns of each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
