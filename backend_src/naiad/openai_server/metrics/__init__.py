"""The metrics that the server counts itself, and those that it takes from Triton's metrics port."""
