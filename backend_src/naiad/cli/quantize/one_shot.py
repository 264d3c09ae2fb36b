"""`python one_shot.py JOB PARENT_WATCH.py PARENT_PID`: quantises, in llm-compressor's environment.

The job has `source` and `target` (directories), `method`, `group` (of compressed-tensors' configuration),
`ignore` (layers that are copied) and `texts` (lists of token ids). Nothing of Naiad can be imported here but
PARENT_WATCH.py, which imports nothing.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

if not torch.accelerator.is_available():
    # AWQ pins what it keeps for a device; torch refuses that where there is none.
    IntermediatesCache.pin_memory = lambda cache, index, names=None: None


def main(job: dict[str, Any]) -> None:
    """Calibrate, quantise and save."""
    layers = {"config_groups": {"group_0": job["group"]}, "ignore": job["ignore"]}
    if job["method"] == "gptq":
        recipe = [GPTQModifier(**layers)]
    else:
        recipe = [AWQModifier(), QuantizationModifier(**layers)]
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto")
    rows: Any = [
        {"input_ids": torch.tensor(text), "attention_mask": torch.ones(len(text), dtype=torch.int64)}
        for text in job["texts"]
    ]
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(job["source"]),
        recipe=recipe,
        dataset=torch.utils.data.DataLoader(rows, batch_size=1),
        num_calibration_samples=len(rows),
        pipeline="sequential",
    )
    model.save_pretrained(job["target"], save_compressed=True)


if __name__ == "__main__":
    # The imports above take so long that the parent may be gone.
    runpy.run_path(sys.argv[2])["end_with_parent"](lambda: None, int(sys.argv[3]))
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
