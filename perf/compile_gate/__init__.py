"""Compiles every kernel as it is served, without a GPU: `python -m perf.compile_gate`."""
