"""Naiad kernels: one package per op, each with a reference, fast implementations and its math.

A `kernel` module needs triton-lang and is imported by the first call with CUDA tensors. So a machine
without a GPU never loads a compiler, and importing an op does not touch the GPU.
"""
