"""The metrics on Triton's metrics port."""
