"""Measures how often draft models agree with the served model: the acceptance rate of first draft tokens.

    python -m perf.engine.draft_agreement DIR …

The served model writes greedy answers to the prompts of `perf.engine.speculation`. At each position the
best token of each draft model is compared with the answer's. Both run in `transformers` in float32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from perf.common.report import print_rows, write_report
from perf.engine.speculation import PROMPTS, encode
from transformers import AutoModelForCausalLM, AutoTokenizer

from naiad.cli.checkpoints.fetch import resolve_model


@torch.inference_mode()
def main() -> int:
    """Compare the models; print and write the results."""
    args = _parse()
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    served, *drafts = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for directory in (model_dir, *args.draft_models)
    )
    names = [directory.resolve().name for directory in args.draft_models]
    rows = []
    for kind in ("free chat", "copying"):
        num_agreed, num_tokens = [0] * len(drafts), 0
        for text in PROMPTS[kind]:
            prompt = torch.tensor([encode(tokenizer, text)])
            ids = served.generate(prompt, max_new_tokens=args.output_tokens, do_sample=False)
            answer = ids[0, prompt.shape[1] :]
            num_tokens += len(answer)
            for number, draft in enumerate(drafts):
                logits = draft(ids[:, :-1]).logits[0, prompt.shape[1] - 1 :]
                num_agreed[number] += int((logits.argmax(-1) == answer).sum())
        rows += [
            {
                "prompts": kind,
                "draft model": name,
                "tokens": num_tokens,
                "agreed": round(agreed / num_tokens, 3),
            }
            for name, agreed in zip(names, num_agreed, strict=True)
        ]
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name, "draft_models": names}
    print("written:", write_report("draft-agreement", settings, rows))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--output-tokens", type=int, default=48, metavar="N")
    parser.add_argument("draft_models", nargs="+", type=Path, metavar="DIR", help="of perf.engine.draft_copy")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
