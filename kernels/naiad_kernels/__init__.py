"""Naiad kernels: one package an op, each with a reference, fast implementations and its math."""
