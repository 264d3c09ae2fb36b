"""Sampling: from logits to the next token, and whether that token ends the sequence."""
