"""Triton's life cycle: one class for each model. Only this folder imports `pb_utils`."""
