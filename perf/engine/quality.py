"""Compares the engine's logits with those of transformers in float32, for every way to round a model.

    python -m perf.engine.quality --model default
    python -m perf.engine.quality --stored GPTQ=DIR AWQ=DIR Q4_0=FILE.gguf

Prints the perplexity of a text of prose and code, the mean Kullback-Leibler divergence (nats) from
transformers' distributions, and how often the most likely token is the same. `--stored` adds quantised copies
of the model: in float32, which is what their files stand for, and as they are served with four bits or eight.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from perf.common.report import print_rows, write_report
from perf.common.torch_threads import all_cores

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.quantize.command import TEXT
from naiad.cli.quantize.quality import BLOCK_SIZE, Quality, logits_of_text
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Way:
    """A way to round a model: values of the engine's options, and a quantised copy if it is one.

    `stored` is its name, and its directory or GGUF file.
    """

    dtype: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    stored: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        copy = f"{self.stored[0]}: " if self.stored else ""
        weights = "" if self.quantization == "none" else f"{self.quantization}, "
        cache = "" if self.kv_cache_dtype == "auto" else f", KV cache {self.kv_cache_dtype}"
        return f"{copy}{weights}{self.dtype}{cache}"


_WAYS = (
    Way("float32"),
    Way("float32", kv_cache_dtype="int8"),
    Way("bfloat16"),
    Way("bfloat16", kv_cache_dtype="int8"),
    Way("float32", "int8"),
    Way("bfloat16", "int8"),
    Way("bfloat16", "int8", "int8"),
    Way("float32", "int4"),
    Way("bfloat16", "int4"),
)
# How a quantised copy is computed: dtype and quantization.
_SERVED = (("float32", "none"), ("bfloat16", "int4"), ("bfloat16", "int8"))


def main() -> int:
    """Measure every way, print a table and write it."""
    args = _parse()
    model_dir = str(resolve_model(args.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    texts = [ids[start : start + args.window] for start in range(0, len(ids), args.window)]
    texts = [text for text in texts if len(text) > 1]
    expected = _transformers_logits(model_dir, texts)
    found = {}
    stored = [Way(*each, stored=copy) for copy in args.stored for each in _SERVED]
    for way in (*_WAYS, *stored):
        found[way.name] = _quality(_runner(model_dir, way, args.window), texts, expected)
        print(way.name, asdict(found[way.name]), flush=True)
    reference = Quality()
    for text, logits in zip(texts, expected, strict=True):
        reference.add(logits[:-1], logits[:-1], torch.tensor(text[1:]))
    rows = [_row("transformers, float32", reference), *(_row(*each) for each in found.items())]
    print(f"{args.model}: {reference.num_tokens} tokens in windows of {args.window}")
    print_rows(rows)
    settings = vars(args) | {"stored": [name for name, _ in args.stored], "num_tokens": reference.num_tokens}
    print("written:", write_report("quality", settings, rows))
    return 0


def _transformers_logits(model_dir: str, texts: list[list[int]]) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode(), all_cores():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def _runner(model_dir: str, way: Way, window: int) -> ModelRunner:
    config = EngineConfig(
        model_dir=way.stored[1] if way.stored else model_dir,
        dtype=way.dtype,
        quantization=way.quantization,
        kv_cache_dtype=way.kv_cache_dtype,
        max_num_batched_tokens=max(window, 32),
        block_size=BLOCK_SIZE,
        kv_cache_bytes=1 << 28,
    )
    return ModelRunner(config)


def _quality(runner: ModelRunner, texts: list[list[int]], expected: list[torch.Tensor]) -> Quality:
    quality = Quality()
    for text, wanted in zip(texts, expected, strict=True):
        quality.add(logits_of_text(runner, text)[:-1], wanted[:-1], torch.tensor(text[1:]))
    return quality


def _row(name: str, quality: Quality) -> dict[str, str]:
    """One line of the table."""
    return {
        "": name,
        "perplexity": f"{quality.perplexity:.3f}",
        "KL": f"{quality.mean_kl:.5f}",
        "same token": f"{quality.same_fraction:.2%}",
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--tokens", type=at_least(2), default=4096, metavar="N", help="of the text")
    parser.add_argument("--window", type=at_least(2), default=512, metavar="N", help="tokens of a context")
    parser.add_argument(
        "--stored",
        type=_stored,
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="quantised copies of the model",
    )
    return parser.parse_args()


def _stored(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (separator and name and Path(path).exists()):
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=PATH of a directory or a GGUF file is wanted")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
