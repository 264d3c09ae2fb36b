"""`naiad replay`."""
