"""The metrics on Triton's port, and the observations that they are made of."""
