"""Compares the engine's logits with those of transformers in float32, for every way to round a model.

    python -m perf.engine.quality --model default

Prints the perplexity of a text of prose and code, the mean Kullback-Leibler divergence (nats) from
transformers' distributions, and how often the most likely token is the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from perf.common.report import print_rows, write_report
from perf.common.torch_threads import all_cores

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams

_TEXT = Path(__file__).parents[1] / "data" / "quality.txt"
_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Way:
    """A way to round a model: values of the engine's options."""

    dtype: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        """What the table calls it."""
        weights = "" if self.quantization == "none" else f"{self.quantization}, "
        cache = "" if self.kv_cache_dtype == "auto" else f", KV cache {self.kv_cache_dtype}"
        return f"{weights}{self.dtype}{cache}"


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


@dataclass(slots=True)
class Quality:
    """Sums over the tokens of a text.

    Attributes:
        num_tokens: tokens that were predicted.
        loss: negative log-likelihoods of the tokens that follow, in nats.
        kl: Kullback-Leibler divergences from the expected distributions, in nats.
        num_same: tokens after which the most likely next token is the expected one.
    """

    num_tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    num_same: int = 0

    def add(self, logits: torch.Tensor, expected: torch.Tensor, following: torch.Tensor) -> None:
        """Add some tokens: logits `[num_tokens, vocab_size]` float32, and the ids that follow."""
        log_probs, wanted = logits.log_softmax(1), expected.log_softmax(1)
        self.num_tokens += len(following)
        self.loss -= log_probs.gather(1, following[:, None]).sum().item()
        self.kl += (wanted.exp() * (wanted - log_probs)).sum().item()
        self.num_same += int((logits.argmax(1) == expected.argmax(1)).sum())

    def row(self, name: str) -> dict[str, str]:
        """One line of the table."""
        return {
            "": name,
            "perplexity": f"{math.exp(self.loss / self.num_tokens):.3f}",
            "KL": f"{self.kl / self.num_tokens:.5f}",
            "same token": f"{self.num_same / self.num_tokens:.2%}",
        }


def main() -> int:
    """Measure every way, print a table and write it."""
    args = _parse()
    model_dir = str(resolve_model(args.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(_TEXT.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    texts = [ids[start : start + args.window] for start in range(0, len(ids), args.window)]
    texts = [text for text in texts if len(text) > 1]
    expected = _transformers_logits(model_dir, texts)
    found = {}
    for way in _WAYS:
        found[way.name] = _quality(_runner(model_dir, way, args.window), texts, expected)
        print(way.name, asdict(found[way.name]), flush=True)
    reference = Quality()
    for text, logits in zip(texts, expected, strict=True):
        reference.add(logits[:-1], logits[:-1], torch.tensor(text[1:]))
    rows = [reference.row("transformers, float32"), *(each.row(name) for name, each in found.items())]
    print(f"{args.model}: {reference.num_tokens} tokens in windows of {args.window}")
    print_rows(rows)
    settings = vars(args) | {"num_tokens": reference.num_tokens}
    print("written:", write_report("quality", settings, rows))
    return 0


def _transformers_logits(model_dir: str, texts: list[list[int]]) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode(), all_cores():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def _runner(model_dir: str, way: Way, window: int) -> ModelRunner:
    config = EngineConfig(
        model_dir=model_dir,
        dtype=way.dtype,
        quantization=way.quantization,
        kv_cache_dtype=way.kv_cache_dtype,
        max_num_batched_tokens=max(window, 32),
        block_size=_BLOCK_SIZE,
        kv_cache_bytes=1 << 28,
    )
    return ModelRunner(config)


def _quality(runner: ModelRunner, texts: list[list[int]], expected: list[torch.Tensor]) -> Quality:
    quality = Quality()
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    for text, wanted in zip(texts, expected, strict=True):
        blocks = list(range(-(-len(text) // _BLOCK_SIZE) + 1))
        output = runner.run(lone_step([LoneRow(0, text, 0, blocks, params)]))
        logits = torch.frombuffer(bytearray(output.context_logits[0]), dtype=torch.float32)
        quality.add(logits.view(wanted.shape)[:-1], wanted[:-1], torch.tensor(text[1:]))
    return quality


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--tokens", type=at_least(2), default=4096, metavar="N", help="of the text")
    parser.add_argument("--window", type=at_least(2), default=512, metavar="N", help="tokens of a context")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
