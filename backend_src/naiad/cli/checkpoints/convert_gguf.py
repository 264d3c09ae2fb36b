"""`python -m naiad.cli.checkpoints.convert_gguf FILE DIR`: GGUF to safetensors and tokenizer files.

It runs in a process of its own so that torch and the weights are out of memory afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf_file: Path, directory: Path) -> None:
    """Dequantize to bfloat16 and save with the tokenizer; the directory must exist."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
