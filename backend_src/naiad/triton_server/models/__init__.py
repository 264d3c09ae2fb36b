"""Triton's life cycle: one class for each model. Only this package imports `pb_utils`."""
