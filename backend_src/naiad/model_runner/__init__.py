"""Turns a `StepBatch` into tensors, runs the model over the paged KV cache, and samples."""

from naiad.model_runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
