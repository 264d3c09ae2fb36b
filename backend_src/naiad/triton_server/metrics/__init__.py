"""The metrics on Triton's metrics port, and the observations that they are computed from."""
