"""Naiad: LLM serving inside NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
