"""GGUF files: what a file says about its model, its tokenizer and its tensors."""

from naiad.gguf.file import GGUFFile, GGUFTensor

__all__ = ["GGUFFile", "GGUFTensor"]
