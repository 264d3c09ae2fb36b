"""Compares the engine with native kernels and with torch's ops on a CPU, in turns, in one run.

    python -m perf.engine.cpu_kernels --dtype float32 --batch 1,8,32

Both get the same prompts and generate the same number of tokens. In float32 the greedy ids must be equal, or
no speed is reported; `--quantization int8` rounds the native engine's weights. `--profile` prints what the
prompts and a decode step of the native kernels spend where. `--avx2` keeps both from using more than AVX2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial
from unittest.mock import patch

from perf.common.report import print_table, write_results
from perf.common.torch_threads import all_cores
from perf.engine.compare_transformers import num_same_prompts
from perf.engine.decode_steps import NUM_WARM_UP_STEPS, start_decoding

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
from naiad.config.engine_config import CPU_QUANTIZATIONS
from naiad.engine import Engine
from naiad.model_runner import ModelRunner, kept_measurements
from naiad.models.native_model import NativeModel
from naiad.sequence import EngineRequest, SamplingParams
from naiad_kernels.native import variants
from naiad_kernels.native.library import Kind

_NUM_PROFILED_STEPS = 40
# Torch's own kernels and its three libraries.
_ONLY_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
}


def main() -> int:
    """Measure, print and write the results; return 1 if the tokens differ."""
    args = _parse()
    if args.avx2:
        _use_only_avx2()
    model_dir = resolve_model(args.model)
    batches = [int(part) for part in args.batch.split(",")]
    # Torch first: the native engine leaves it one thread.
    engines: dict[str, Engine] = {}
    for kernels in ("torch", "native"):
        config = EngineConfig(
            model_dir=str(model_dir),
            dtype=args.dtype,
            max_num_seqs=max(batches),
            cpu_kernels=kernels,
            quantization=args.quantization if kernels == "native" else "none",
            enable_prefix_caching=False,
            drafter="none",
        )
        engines[kernels], dtype = load_engine(config)
    contestants = {
        "native": engine_generate(engines["native"]),
        "torch": _with_all_cores(engine_generate(engines["torch"])),
    }
    timings: dict[int, dict[str, Timing]] = {}
    for batch in batches:
        work = Work(batch, args.prompt_tokens, args.output_tokens)
        make_prompts = partial(random_prompts, work, engines["native"].model_config.vocab_size)
        same = num_same_prompts(contestants["native"], contestants["torch"], make_prompts(-1))
        print(f"batch {batch}: {same} of {batch} prompts give the same tokens", flush=True)
        if dtype == "float32" and args.quantization == "none" and same < batch:
            print("the greedy tokens differ in float32: no speed is reported", file=sys.stderr)
            return 1
        timings[batch] = measure(contestants, make_prompts, work, args.repeats)
    print_table(timings, rival="torch")
    if args.profile:
        for batch in batches:
            prompts = random_prompts(
                Work(batch, args.prompt_tokens, 1), engines["native"].model_config.vocab_size, 0
            )
            print_profile(engines["native"], prompts)
    settings = vars(args) | {"model": model_dir.name, "dtype": dtype}
    print("written:", write_results("cpu-kernels", settings, timings))
    return 0


def _use_only_avx2() -> None:
    """Begin again with torch's variables, which count from its import on; then hide what else the CPU has."""
    if not _ONLY_AVX2.items() <= os.environ.items():
        command = [sys.executable, "-m", "perf.engine.cpu_kernels", *sys.argv[1:]]
        os.execve(sys.executable, command, dict(os.environ) | _ONLY_AVX2)
    hidden = {flag for flag in variants.cpu_flags() if flag.startswith(("avx512", "amx", "avx_vnni"))}
    kept = variants.cpu_flags() - hidden
    for user in (variants, kept_measurements):
        patch.object(user, "cpu_flags", return_value=kept).start()


def print_profile(engine: Engine, prompts: Prompts) -> None:
    """Print what these prompts, and then a decode step, spend where, in milliseconds."""
    model = _native_model(engine)
    for sequence_id, prompt in enumerate(prompts):
        request = EngineRequest(
            sequence_id=sequence_id, prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)
        )
        engine.add_request(request)
    start_s = time.perf_counter()
    with model.profiled() as profile:
        while engine.has_work:
            engine.step()
    _print_parts(f"batch {len(prompts)}: prompts", time.perf_counter() - start_s, profile, 1)
    params = SamplingParams(max_tokens=NUM_WARM_UP_STEPS + 2 * _NUM_PROFILED_STEPS)
    start_decoding(engine, prompts, params)
    start_s = time.perf_counter()
    with model.profiled() as profile:
        for _ in range(_NUM_PROFILED_STEPS):
            engine.step()
    _print_parts(f"batch {len(prompts)}: step", time.perf_counter() - start_s, profile, _NUM_PROFILED_STEPS)
    while engine.has_work:
        engine.step()


def _native_model(engine: Engine) -> NativeModel:
    runner = engine._model_runner
    assert isinstance(runner, ModelRunner)
    model = runner._model
    assert isinstance(model, NativeModel)
    return model


def _print_parts(name: str, elapsed_s: float, profile: Counter[Kind], count: int) -> None:
    """One line; `count` is how often it happened."""
    parts = {kind.name.lower(): total / count / 1e6 for kind, total in profile.most_common()}
    whole_ms = elapsed_s / count * 1e3
    parts["everything else"] = whole_ms - sum(parts.values())
    listed = ", ".join(f"{part} {part_ms:.2f}" for part, part_ms in parts.items())
    print(f"{name} {whole_ms:.2f} ms: {listed}")


def _with_all_cores(generate: Generate) -> Generate:
    def generate_with_all_cores(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        with all_cores():
            return generate(prompts, num_tokens)

    return generate_with_all_cores


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=CPU_QUANTIZATIONS)
    parser.add_argument("--batch", default="1,8,32", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median is reported")
    parser.add_argument("--avx2", action="store_true", help="use AVX2 and nothing newer")
    parser.add_argument("--profile", action="store_true", help="print where the native kernels' time goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
