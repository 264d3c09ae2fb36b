"""Assigns KV cache blocks to sequences. It handles block ids only; the model runner owns the tensors."""
