"""Compiles every kernel as serving does, without a GPU: `python -m perf.compile_gate`."""
