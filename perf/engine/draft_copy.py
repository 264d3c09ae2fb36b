"""Writes a draft model derived from the served one: its first layers, or all of it in fewer bits.

    python -m perf.engine.draft_copy --bits 4 DIR
    python -m perf.engine.speculation --drafters draft_model --draft-model DIR --all-drafts

If no smaller model with the same vocabulary is available, these show how often drafts by a model are
accepted. A copy in fewer bits is as slow as the model itself: only its numbers are rounded, to
2 ** bits - 1 steps for each output of each linear layer.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model


def main() -> int:
    """Write the copy; return 1 if the destination exists."""
    args = _parse()
    if args.destination.exists():
        print(f"{args.destination} already exists: choose another directory", file=sys.stderr)
        return 1
    model_dir = resolve_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    if args.layers:
        if args.layers > model.config.num_hidden_layers:
            most = model.config.num_hidden_layers
            print(f"--layers {args.layers}: the model has {most} layers", file=sys.stderr)
            return 1
        keep_first_layers(model, args.layers)
    else:
        round_weights(model, args.bits)
    model.save_pretrained(args.destination)
    for path in model_dir.glob("token*"):
        shutil.copy(path, args.destination)
    print(f"written: {args.destination}")
    return 0


def keep_first_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Drop the later layers; norm and head stay."""
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]


def round_weights(model: PreTrainedModel, num_bits: int) -> None:
    """Round the layers' linear weights, each row with its own scale; embedding and head are unchanged."""
    most = 2 ** (num_bits - 1) - 1
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
            module.weight.data = ((weight.float() / scale).round() * scale).to(weight.dtype)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--layers", type=at_least(1), metavar="N", help="number of first layers to keep")
    how.add_argument("--bits", type=int, choices=range(2, 17), metavar="N", help="bits per weight, 2 … 16")
    parser.add_argument("destination", type=Path, metavar="DIR", help="must not exist")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
