"""Measures a whole model on a GPU: the engine, the memory bound, and `transformers`, in one run.

    python -m perf.engine.whole_model --models llama-3-8b,default
    python -m perf.engine.whole_model --rehearse

`llama-3-8b` has that shape and random weights that are generated here; other models are directories or
names. The bound of a decode step is the time to read every weight and every cached token once, at the
copy bandwidth measured in the same run. `device_waits` is the share of a decode step in which the GPU
computes nothing. `same_prompts` counts the prompts with the same tokens as `generate`; in float32 these
must be all. With `--quantization` the engine's weights are rounded, and the bound is that of the rounded
ones; those of `transformers` are not. `--rehearse` runs everything on a CPU with a tiny model, without
verdicts and reports.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from perf.common.report import print_rows, write_report
from perf.common.transformers_generate import load_transformers, padded_generate, paged_generate_s
from perf.engine.compare_transformers import num_same_prompts
from perf.engine.device_wait import waiting_share
from perf.engine.random_checkpoint import LLAMA_3_8B, TINY, write_random_checkpoint
from perf.kernels import sizes
from perf.kernels.ceilings import measure_ceilings
from perf.kernels.clock import Clock

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import (
    Prompts,
    Timing,
    Work,
    engine_generate,
    figures,
    measure,
    random_prompts,
)
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig, ModelConfig
from naiad.config.engine_config import QUANTIZATIONS
from naiad.engine import Engine, build_engine
from naiad.errors import InternalError

RANDOM_8B = "llama-3-8b"
# Targets: the share of the bound with one text on the 8B shape, and the speed relative to `generate_batch`.
LEAST_OF_BOUND, LEAST_OF_PAGED, JUDGED_BATCH = 0.85, 3.0, 256
# Of a weight of the layers, with its share of a scale and a zero point, and of one of the head.
_ROUNDED_BYTES = {"int8": (1, 1), "fp8": (1, 1), "int4": (5 / 8, 1)}
REHEARSAL: dict[str, Any] = {
    "models": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "quantization": "none",
    "batch": "1,3",
    "prompt_tokens": 8,
    "output_tokens": 24,
    "repeats": 1,
}

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write the results; return 1 without a GPU."""
    args = _parse()
    args.device = "cuda"
    if args.rehearse:
        vars(args).update(REHEARSAL)
    elif not torch.cuda.is_available():
        print("error: PyTorch finds no CUDA device; --rehearse runs a tiny model on a CPU", file=sys.stderr)
        return 1
    device = torch.device(args.device)
    shapes = sizes.TINY if args.rehearse else sizes.LLAMA_3_8B
    ceilings = measure_ceilings(shapes, device, Clock(device, repeats=50))
    print(f"copy {ceilings.bytes_per_s / 1e12:.3f} TB/s", flush=True)
    results: list[Row] = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            results += measure_model(name, _model_dir(name, Path(scratch), args), args, ceilings.bytes_per_s)
    if not args.rehearse:
        print("written:", write_report("whole-model", vars(args) | ceilings.settings(), results))
    return 0


def measure_model(name: str, model_dir: Path, args: argparse.Namespace, bytes_per_s: float) -> list[Row]:
    """Measure every batch size with one model.

    Args:
        name: the model's name in the table.
        model_dir: the checkpoint.
        args: the command line's.
        bytes_per_s: the memory's bandwidth.

    Raises:
        InternalError: in float32 the engine's tokens differ from those of `transformers`.
    """
    config = ModelConfig.from_directory(str(model_dir))
    batches = [int(part) for part in args.batch.split(",")]
    engine = _engine(model_dir, config, max(batches), args)
    theirs = load_transformers(model_dir, args.dtype, args.device)
    contestants = {"engine": engine_generate(engine), "generate": padded_generate(theirs)}
    rows = []
    for batch in batches:
        work = Work(batch, args.prompt_tokens, args.output_tokens)
        make_prompts = partial(random_prompts, work, config.vocab_size)
        same = num_same_prompts(contestants["engine"], contestants["generate"], make_prompts(-2))
        if args.dtype == "float32" and args.quantization == "none" and same < batch:
            raise InternalError(f"batch {batch}: {same} prompts give the tokens of transformers")
        timings = measure(contestants, make_prompts, work, args.repeats)
        timings["generate_batch"] = _paged_timing(theirs, make_prompts, work, args.repeats)
        waits = waiting_share(engine, make_prompts(-1))
        bound_s = step_bytes(config, work, args.dtype, args.quantization) / bytes_per_s
        of_batch = [_row(name, each, timing, bound_s) for each, timing in timings.items()]
        of_batch[0] |= {"device_waits": waits, "same_prompts": same}
        has_target = not args.rehearse and args.quantization == "none"
        of_batch[0]["target"] = verdict(of_batch) if has_target else ""
        print_rows([{key: _cell(value) for key, value in row.items()} for row in of_batch])
        rows += of_batch
    return rows


def step_bytes(config: ModelConfig, work: Work, dtype: str, quantization: str = "none") -> int:
    """Bytes that a decode step must read: the weights once, and the cached tokens, averaged over steps."""
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = 2 * config.hidden_size * heads + 3 * config.hidden_size * config.intermediate_size
    weights, head = config.num_layers * layer, config.vocab_size * config.hidden_size
    item_bytes = getattr(torch, dtype).itemsize
    weight_bytes, head_bytes = _ROUNDED_BYTES.get(quantization, (item_bytes, item_bytes))
    cached = work.batch * (work.prompt_tokens + work.output_tokens / 2) * _token_elements(config)
    return int(weights * weight_bytes + head * head_bytes + cached * item_bytes)


def verdict(rows: list[Row]) -> str:
    """Whether the engine (first row) meets its target, given `generate_batch` (last row); "": no target."""
    ours, paged = rows[0], rows[-1]
    if ours["model"] == RANDOM_8B and ours["batch"] == 1:
        word = "met" if ours["of_bound"] >= LEAST_OF_BOUND else "missed"
        return f"{word}: of_bound ≥ {LEAST_OF_BOUND:g}"
    if ours["batch"] == JUDGED_BATCH:
        ratio = ours["output_tokens_per_s"] / paged["output_tokens_per_s"]
        word = "met" if ratio >= LEAST_OF_PAGED else "missed"
        return f"{word}: {ratio:.2f} × generate_batch, ≥ {LEAST_OF_PAGED:g}"
    return ""


def _token_elements(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _model_dir(name: str, scratch: Path, args: argparse.Namespace) -> Path:
    shapes = {RANDOM_8B: LLAMA_3_8B, "tiny": TINY}
    if name in shapes:
        return write_random_checkpoint(scratch, shapes[name], args.dtype, args.device)
    return resolve_model(name)


def _engine(model_dir: Path, config: ModelConfig, max_num_seqs: int, args: argparse.Namespace) -> Engine:
    # Leave the memory that these texts do not need to the other contestants.
    tokens = max_num_seqs * (args.prompt_tokens + args.output_tokens + 2 * args.block_size)
    kv_cache_bytes = tokens * _token_elements(config) * getattr(torch, args.dtype).itemsize
    return build_engine(
        EngineConfig(
            model_dir=str(model_dir),
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            max_num_seqs=max_num_seqs,
            block_size=args.block_size,
            kv_cache_bytes=kv_cache_bytes,
            enable_prefix_caching=False,
            drafter="none",
        )
    )


def _paged_timing(model: Any, make_prompts: partial[Prompts], work: Work, repeats: int) -> Timing:
    times = [
        paged_generate_s(model, make_prompts(1_000 + turn), work.output_tokens) for turn in range(repeats)
    ]
    first_s, total_s = (statistics.median(each) for each in zip(*times, strict=True))
    return Timing(work.batch, work.prompt_tokens, work.output_tokens, first_s, total_s)


def _row(model: str, contestant: str, timing: Timing, bound_s: float) -> Row:
    step_s = timing.batch / timing.decode_tokens_per_s
    return {
        "model": model,
        "contestant": contestant,
        **figures(timing),
        "step_ms": 1e3 * step_s,
        "of_bound": bound_s / step_s,
        "device_waits": None,
        "same_prompts": None,
        "target": "",
    }


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=RANDOM_8B, metavar="NAME,…", help=f"{RANDOM_8B}, default, DIR or org/name"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--batch", default="1,32,256", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    parser.add_argument("--block-size", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median is reported")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
