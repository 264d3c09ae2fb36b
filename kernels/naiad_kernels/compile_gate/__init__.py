"""Compiles every kernel as it is served, without a GPU: `python -m naiad_kernels.compile_gate`."""
